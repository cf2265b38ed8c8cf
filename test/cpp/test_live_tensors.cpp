// The list of live tensors: the reads that belong to it, and the graph of its step.
#include "check.h"
#include "step/live_tensors.h"

namespace torch_xla_donate {
namespace {

struct Buffer {};
struct Tensor {};
using List = LiveTensorList<Tensor, Buffer>;

const auto kComputes = [] { return false; };
const auto kIsDeviceData = [] { return true; };

// A list of three tensors, of which the second holds a buffer.
struct Listed {
  std::vector<std::shared_ptr<Tensor>> tensors{3};
  Buffer buffer;
  List list;

  Listed() {
    list.Reset(true);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors[i] = std::make_shared<Tensor>();
      list.Add(tensors[i], i == 1 ? &buffer : nullptr, static_cast<std::int64_t>(i) + 7);
    }
  }
  bool Ask(std::size_t i) { return list.IsListRead(tensors[i].get(), i == 1, kComputes); }
};

}  // namespace

TEST(a_step_asks_each_tensor_once_in_order_and_its_outputs_again) {
  Listed step;
  CHECK(step.Ask(0) && step.Ask(1) && step.Ask(2));
  CHECK(step.list.IsOfStep(2));
  CHECK(step.Ask(0) && step.Ask(2));
  CHECK(step.list.IsOfStep(2));
}

TEST(a_graph_before_all_have_been_asked_is_not_the_steps) {
  Listed step;
  CHECK(step.Ask(0) && step.Ask(1));
  CHECK(!step.list.IsOfStep(2));
}

TEST(a_graph_after_too_many_questions_is_not_the_steps) {
  Listed step;
  CHECK(step.Ask(0) && step.Ask(1) && step.Ask(2));
  CHECK(step.Ask(0) && step.Ask(2));
  CHECK(!step.list.IsOfStep(1));
}

TEST(a_tensor_out_of_order_is_a_read) {
  Listed step;
  CHECK(!step.Ask(1));
  Listed other;
  CHECK(!other.Ask(2));
}

TEST(a_tensor_that_holds_data_is_a_read_once_the_list_has_ended) {
  Listed step;
  CHECK(step.Ask(0) && step.Ask(1) && step.Ask(2));
  CHECK(!step.Ask(1));
}

TEST(a_tensor_whose_graph_is_device_data_is_asked_twice) {
  Listed step;
  CHECK(step.Ask(0));
  CHECK(step.list.IsListRead(step.tensors[0].get(), false, kIsDeviceData));
  CHECK(!step.list.IsListRead(step.tensors[0].get(), false, kComputes));
}

TEST(a_list_that_is_not_kept_belongs_to_no_step) {
  List list;
  CHECK(!list.IsOfStep(1));
  list.Reset(true);
  CHECK(list.IsKept() && list.IsOfStep(1));
  list.Reset(false);
  CHECK(!list.IsKept() && !list.IsOfStep(1));
}

TEST(tensors_come_in_the_executors_order_and_are_held_weakly) {
  Listed step;
  CHECK_EQ(step.list.Newest(), 9);
  CHECK_EQ(step.list.BufferOf(1), &step.buffer);
  CHECK_EQ(step.list.BufferOf(2), static_cast<const Buffer*>(nullptr));
  const Tensor* last = step.tensors[2].get();
  step.tensors[1] = nullptr;
  CHECK_EQ(step.list.Tensors().size(), 3U);
  CHECK(step.list.Tensors()[1] == nullptr);
  CHECK_EQ(step.list.Tensors()[2].get(), last);
}

}  // namespace torch_xla_donate
