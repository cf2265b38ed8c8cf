// The list of live tensors: the reads that belong to it, and the graph of its step.
#include <initializer_list>

#include "check.h"
#include "step/live_tensors.h"

namespace torch_xla_donate {
namespace {

struct Tensor {
  std::int64_t unique_id;
};

const auto kComputes = [] { return false; };
const auto kIsDeviceData = [] { return true; };

// A list of the tensors 7, 8 and 9, of which the second holds a buffer.
struct Listed {
  int buffer;
  LiveTensorList list;

  Listed() {
    list.Reset(true);
    for (const std::int64_t id : {7, 8, 9}) {
      list.Add(id, id == 8 ? &buffer : nullptr);
    }
  }
  bool Ask(std::int64_t i) { return list.IsListRead(7 + i, i == 1, kComputes); }
};

std::vector<std::shared_ptr<Tensor>> Tensors(std::initializer_list<std::int64_t> ids) {
  std::vector<std::shared_ptr<Tensor>> tensors;
  for (const std::int64_t id : ids) {
    tensors.push_back(std::make_shared<Tensor>(Tensor{id}));
  }
  return tensors;
}

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
  CHECK(step.list.IsListRead(7, false, kIsDeviceData));
  CHECK(!step.list.IsListRead(7, false, kComputes));
}

TEST(a_list_that_is_not_kept_belongs_to_no_step) {
  LiveTensorList list;
  CHECK(!list.IsOfStep(1));
  list.Reset(true);
  CHECK(list.IsKept() && list.IsOfStep(1));
  list.Reset(false);
  CHECK(!list.IsKept() && !list.IsOfStep(1));
}

TEST(a_list_knows_the_buffers_that_its_tensors_held) {
  const Listed step;
  CHECK_EQ(step.list.Size(), 3U);
  CHECK_EQ(step.list.BufferOf(1), static_cast<const void*>(&step.buffer));
  CHECK_EQ(step.list.BufferOf(2), static_cast<const void*>(nullptr));
}

TEST(the_next_read_is_known_before_its_handle) {
  Listed step;
  CHECK(step.list.IsNextRead(7) && step.list.IsNextRead(8));
  CHECK(!step.list.IsNextRead(7));
  CHECK(!step.list.IsListRead(8, true, kComputes));
  CHECK(step.list.IsNextRead(9));
  CHECK(!step.list.IsNextRead(9));
  CHECK(step.list.IsOfStep(1));
}

TEST(live_tensors_of_the_list_alone_stay_as_they_are) {
  const std::vector<std::shared_ptr<Tensor>> live = Tensors({7, 8, 9});
  CHECK(Listed().list.Arrange(live) == live);
  CHECK(LiveTensorList().Arrange(live) == live);
}

TEST(live_tensors_are_arranged_as_the_list_with_those_that_it_lacks_at_the_end) {
  const Listed step;
  const std::vector<std::shared_ptr<Tensor>> live = Tensors({3, 7, 9, 12});  // 8 is gone
  const std::vector<std::shared_ptr<Tensor>> arranged = step.list.Arrange(live);
  CHECK_EQ(arranged.size(), 5U);
  CHECK_EQ(arranged[0], live[1]);
  CHECK(arranged[1] == nullptr);
  CHECK_EQ(arranged[2], live[2]);
  CHECK_EQ(arranged[3], live[0]);
  CHECK_EQ(arranged[4], live[3]);
}

}  // namespace torch_xla_donate
