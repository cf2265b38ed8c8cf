// The plan of a step, and XLA's rule for sizes: plain numbers for parameters, outputs and bytes.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "check.h"
#include "step/plan.h"

namespace torch_xla_donate {
namespace {

using Positions = std::vector<std::size_t>;
using Place = std::optional<std::size_t>;

std::string Text(const Positions& positions) {
  std::string text;
  for (const std::size_t position : positions) text += std::to_string(position) + " ";
  return text;
}

// Whether it is an order of all the places.
bool IsWhole(Positions order, std::size_t count) {
  std::sort(order.begin(), order.end());
  Positions all(count);
  std::iota(all.begin(), all.end(), std::size_t{0});
  return order == all;
}

// A step of parameters and outputs; near[o] are the parameters from which output o is computed.
struct Step {
  std::vector<ArraySize> bytes, output_bytes;
  std::vector<Positions> near{};
  std::vector<bool> donors = std::vector<bool>(bytes.size());
  std::vector<bool> offered = std::vector<bool>(bytes.size());
  std::vector<Place> preferred = std::vector<Place>(bytes.size());
  std::vector<bool> movable = std::vector<bool>(output_bytes.size(), true);
  bool keep_order = false;

  DonorPairs Pair() const {
    const auto near_output = [this](std::size_t output) {
      std::vector<NearParameter> found;
      for (std::size_t i = 0; output < near.size() && i < near[output].size(); ++i) {
        found.push_back({i + 1, near[output][i]});
      }
      return found;
    };
    DonorPairs pairs = PairDonors({bytes, output_bytes, movable, donors, offered, preferred, near_output, keep_order});
    CHECK(IsWhole(pairs.parameter_order, bytes.size()) && IsWhole(pairs.output_order, output_bytes.size()));
    return pairs;
  }
};

bool IsSorted(const Positions& order) { return std::is_sorted(order.begin(), order.end()); }

// The output that XLA gives to each donor, if donors and outputs have the order of the plan.
std::vector<Place> AsXlaPairs(const Step& step, const DonorPairs& plan) {
  Positions outputs = plan.output_order;
  std::vector<Place> result(step.bytes.size());
  for (const std::size_t parameter : plan.parameter_order) {
    const bool chosen = std::find(plan.chosen.begin(), plan.chosen.end(), parameter) != plan.chosen.end();
    if (!step.donors[parameter] && !chosen) continue;
    for (std::size_t& output : outputs) {
      if (output < step.output_bytes.size() && step.output_bytes[output] == step.bytes[parameter]) {
        result[parameter] = std::exchange(output, step.output_bytes.size());
        break;
      }
    }
  }
  return result;
}

}  // namespace

TEST(a_donor_takes_an_output_of_its_size) {
  FreeOutputs free({4, 8, 8, std::nullopt});
  CHECK(free.Take(8) && free.Take(8) && !free.Take(8));
  CHECK(!free.Take(std::nullopt) && !free.Take(16));
  CHECK_EQ(free.Count(4), 1U);
}

TEST(donors_in_the_order_of_their_outputs_stay_where_they_are) {
  Step step{{4, 4}, {4, 4}, {{0}, {1}}};
  step.donors = {true, true};
  const DonorPairs plan = step.Pair();
  CHECK(IsSorted(plan.parameter_order) && IsSorted(plan.output_order) && plan.chosen.empty());
  CHECK(!plan.has_room[0] && !plan.has_room[1]);
}

TEST(only_donors_of_a_size_that_crosses_change_places) {
  // Inputs of 4 bytes cross; 1 and 4 are not donors, and those of 8 bytes are in order.
  Step step{{4, 4, 8, 4, 4, 8}, {4, 4, 8, 8}, {{3}, {0}, {2}, {5}}};
  step.donors = {true, false, true, true, false, true};
  const DonorPairs plan = step.Pair();
  CHECK_EQ(Text(plan.parameter_order), "3 1 2 0 4 5 ");
  const std::vector<Place> pairs = AsXlaPairs(step, plan);
  CHECK(pairs[3] == Place(0) && pairs[0] == Place(1) && pairs[2] == Place(2) && pairs[5] == Place(3));
}

TEST(a_step_that_keeps_its_order_crosses) {
  Step step{{4, 4, 8}, {4, 4, 8, 8}, {{1}, {0}, {}, {2}}};
  step.donors = {true, true, true};
  CHECK(!IsSorted(step.Pair().parameter_order) && !IsSorted(step.Pair().output_order));
  step.keep_order = true;
  const DonorPairs plan = step.Pair();
  CHECK(IsSorted(plan.parameter_order) && IsSorted(plan.output_order));
  CHECK(plan.preferred_output[0] == Place(1) && plan.preferred_output[1] == Place(0) &&
        plan.preferred_output[2] == Place(3));
}

TEST(the_nearest_donor_takes_the_output) {
  Step step{{4, 4}, {4}, {{1, 0}}};
  step.donors = {true, true};
  const DonorPairs plan = step.Pair();
  CHECK_EQ(Text(plan.parameter_order), "1 0 ");
  CHECK(AsXlaPairs(step, plan)[1] == Place(0));
}

TEST(a_preferred_output_counts_before_the_nearest) {
  Step step{{4, 4}, {4, 4}, {{0}, {1}}};
  step.donors = {true, true};
  step.preferred = {1, std::nullopt};
  const auto pairs = AsXlaPairs(step, step.Pair());
  CHECK(pairs[0] == Place(1) && pairs[1] == Place(0));
}

TEST(only_as_many_inputs_join_as_outputs_are_left) {
  Step step{{4, 4, 4}, {4, 4}, {{0}, {2}}};
  step.donors = {true, false, false};
  step.offered = {false, true, true};
  const DonorPairs plan = step.Pair();
  CHECK_EQ(Text(plan.chosen), "2 ");
  CHECK(plan.preferred_output[2] == Place(1));
}

TEST(an_input_leaves_the_donors_what_they_need) {
  Step step{{4, 4}, {4}, {{1}}};
  step.donors = {true, false};
  step.offered = {false, true};
  const DonorPairs plan = step.Pair();
  CHECK(plan.chosen.empty() && !plan.has_room[1]);
  CHECK(AsXlaPairs(step, plan)[0] == Place(0));
}

TEST(an_input_of_another_size_does_not_join) {
  Step step{{8, 4}, {4}, {{0}}};
  step.offered = {true, false};
  const DonorPairs plan = step.Pair();
  CHECK(plan.chosen.empty() && !plan.has_room[0] && plan.has_room[1]);
}

TEST(an_output_with_a_donor_moves_before_one_without) {
  Step step{{4}, {4, 4}, {{}, {0}}};
  step.donors = {true};
  const DonorPairs plan = step.Pair();
  CHECK_EQ(Text(plan.output_order), "1 0 ");
  CHECK(AsXlaPairs(step, plan)[0] == Place(1));
}

TEST(an_output_that_cannot_move_stays) {
  Step step{{4}, {4, 4}, {{}, {0}}};
  step.donors = {true};
  step.movable = {true, false};
  CHECK(IsSorted(step.Pair().output_order));
}

TEST(a_parameter_of_unknown_size_is_never_paired) {
  Step step{{std::nullopt}, {4}, {{0}}};
  step.offered = {true};
  CHECK(step.Pair().chosen.empty());
}

TEST(a_refused_donor_leaves_the_order_alone) {
  Step step{{4, 4}, {4, 4}, {{1}, {0}}};  // crossed, but neither is in the donor set
  CHECK(IsSorted(step.Pair().parameter_order));
}

namespace {

StepPlan PlanOf(const std::vector<ArraySize>& bytes, const std::vector<ArraySize>& output_bytes,
                const std::vector<PlanInput>& inputs, const std::vector<Positions>& near) {
  const auto find_near = [&near](std::size_t output) {
    std::vector<NearParameter> found;
    for (const std::size_t parameter : near[output]) found.push_back({found.size() + 1, parameter});
    return found;
  };
  return Plan({bytes, output_bytes, std::vector<bool>(output_bytes.size(), true)}, inputs, find_near, false);
}

PlanInput Marked() {
  PlanInput input;
  input.is_marked = true;
  return input;
}
PlanInput UpdatedInPlace(std::size_t output) {
  PlanInput input;
  input.is_updated_in_place = true;
  input.preferred_output = output;
  return input;
}
PlanInput Reached(bool held, bool read_later) {
  PlanInput input;
  input.is_held = held;
  input.is_read_later = read_later;
  return input;
}

}  // namespace

TEST(a_plan_names_the_use_of_each_input_and_its_output) {
  // Outputs 0 to 3 are computed from the inputs 0 to 3.
  const StepPlan plan = PlanOf({4, 4, 4, 4, 4, 8}, {4, 4, 4, 4},
                               {UpdatedInPlace(0), Marked(), Reached(false, false), Reached(true, false),
                                Reached(false, true), Reached(false, false)},
                               {{0}, {1}, {2}, {3}});
  CHECK(plan.uses == (std::vector<InputUse>{InputUse::kUpdatedInPlace, InputUse::kMarked, InputUse::kFree,
                                            InputUse::kHeld, InputUse::kOther, InputUse::kOther}));
  CHECK(plan.output_of == (std::vector<Place>{0, std::nullopt, 2, 3, std::nullopt, std::nullopt}));
  CHECK_EQ(Text(plan.pairs.chosen), "2 ");
  CHECK(plan.pairs.has_room[3]);  // the held input does not take its output
}

TEST(an_input_that_something_reaches_or_that_is_barred_is_never_chosen) {
  PlanInput barred = Reached(false, false);
  barred.is_barred = true;
  for (const PlanInput& input : {Reached(true, false), Reached(false, true), PlanInput(), barred}) {
    CHECK(PlanOf({4}, {4}, {input}, {{0}}).pairs.chosen.empty());
  }
  CHECK_EQ(Text(PlanOf({4}, {4}, {Reached(false, false)}, {{0}}).pairs.chosen), "0 ");
}

TEST(a_free_input_gets_an_output_before_a_held_one) {
  const StepPlan plan = PlanOf({4, 4}, {4}, {Reached(true, false), Reached(false, false)}, {{0, 1}});
  CHECK(plan.uses == (std::vector<InputUse>{InputUse::kOther, InputUse::kFree}));
}

TEST(with_sizes_that_only_the_device_knows_no_input_joins) {
  const auto near = [](std::size_t) { return std::vector<NearParameter>{{1, 0}}; };
  const GraphSizes sizes{{4}, {4}, {true}, /*dynamic=*/true};
  CHECK(Plan(sizes, {Reached(false, false)}, near, false).pairs.chosen.empty());
  CHECK(Plan(sizes, {Marked()}, near, false).uses[0] == InputUse::kMarked);
}

}  // namespace torch_xla_donate
