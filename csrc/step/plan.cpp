// Pairs the free inputs with outputs, then the held ones with what is left.
#include "step/plan.h"

namespace torch_xla_donate {

std::vector<bool> FindFits(const GraphSizes& sizes, const std::vector<PlanInput>& inputs) {
  FreeOutputs free(sizes.output_bytes);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].IsDonor()) {
      free.Take(sizes.bytes[i]);
    }
  }
  std::vector<bool> fits;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ArraySize& bytes = sizes.bytes[i];
    fits.push_back(!sizes.dynamic && !inputs[i].IsDonor() && bytes.value_or(0) > 0 && free.Count(bytes) > 0);
  }
  return fits;
}

InputUse UseIfPaired(const PlanInput& input, bool fits) {
  if (input.IsDonor()) {
    return input.is_updated_in_place ? InputUse::kUpdatedInPlace : InputUse::kMarked;
  }
  if (!fits || input.is_barred) {
    return InputUse::kOther;
  }
  if (input.is_held) {
    return InputUse::kHeld;
  }
  return input.is_read_later ? InputUse::kReadLater : InputUse::kFree;
}

StepPlan Plan(const GraphSizes& sizes, const std::vector<PlanInput>& inputs, const FindNear& near, bool keep_order) {
  const std::vector<bool> fits = FindFits(sizes, inputs);
  StepPlan plan;
  std::vector<bool> donors, free, held;
  std::vector<std::optional<std::size_t>> preferred_output;
  bool has_held = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const InputUse use = UseIfPaired(inputs[i], fits[i]);
    donors.push_back(inputs[i].IsDonor());
    free.push_back(use == InputUse::kFree);
    held.push_back(use == InputUse::kHeld);
    has_held = has_held || held.back();
    preferred_output.push_back(inputs[i].preferred_output);
    plan.uses.push_back(donors.back() ? use : InputUse::kOther);
    plan.output_of.push_back(donors.back() ? inputs[i].preferred_output : std::nullopt);
  }
  const auto pair = [&](const std::vector<bool>& offered, const std::vector<std::optional<std::size_t>>& preferred) {
    return PairDonors({sizes.bytes, sizes.output_bytes, sizes.movable, donors, offered, preferred, near, keep_order});
  };
  const auto note_chosen = [&](const DonorPairs& pairs) {
    for (const std::size_t i : pairs.chosen) {
      plan.uses[i] = UseIfPaired(inputs[i], fits[i]);
      plan.output_of[i] = pairs.preferred_output[i];
      donors[i] = true;
    }
  };
  plan.pairs = pair(free, preferred_output);
  note_chosen(plan.pairs);
  if (has_held) {
    note_chosen(pair(held, plan.pairs.preferred_output));
  }
  return plan;
}

}  // namespace torch_xla_donate
