// The plan for a step: which inputs become donors, the order of parameters and outputs, and the use of each input.
//
// Everything here is a function of sizes and facts, without torch and XLA, so that tests need neither. donor_set.h
// collects the facts of a step, planner.h keeps the plans of graphs that run again.
//
// Threads: functions of their arguments. Errors: throws none itself.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "step/size_pairing.h"

namespace torch_xla_donate {

// The sizes of a graph's parameters and outputs.
struct GraphSizes {
  std::vector<ArraySize> bytes;         // of the parameters
  std::vector<ArraySize> output_bytes;  // of the outputs
  std::vector<bool> movable;            // by output: torch_xla can make an array for it, so it may move
  bool dynamic = false;                 // only the device knows the size of some output, so XLA pairs nothing new
};

// What is known of a parameter.
struct PlanInput {
  bool is_marked = false;                       // the program has marked it, and no other tensor holds it
  bool is_updated_in_place = false;             // torch_xla donates it, because an output replaces it
  bool is_barred = false;                       // must not be donated, even if nothing holds it
  bool is_held = true;                          // by a live tensor
  bool is_read_later = true;                    // by work that stays pending
  std::optional<std::size_t> preferred_output;  // of a donor: the output that the program gives its buffer to

  bool IsDonor() const { return is_marked || is_updated_in_place; }
};

// The names are in python/bind_auto.cpp.
enum class InputUse {
  kUpdatedInPlace,  // a donor of torch_xla
  kMarked,          // a donor that the program has marked
  kFree,            // nothing can reach it after the step, and an output can take its memory
  kHeld,            // the same, but a live tensor holds it
  kReadLater,       // the same, but pending work reads it; only the planner sees it, a StepPlan has kOther
  kOther,           // no output can take its memory
};

struct StepPlan {
  std::vector<InputUse> uses;  // by parameter
  DonorPairs pairs;            // pairs.chosen are the free inputs that become donors
  // By parameter: the output that the program gives a donor to, that a free input goes to, or that a held one would.
  std::vector<std::optional<std::size_t>> output_of;
};

// By parameter: whether it is no donor, and an output of its size has none.
std::vector<bool> FindFits(const GraphSizes& sizes, const std::vector<PlanInput>& inputs);

// The use of an input if it is paired; else it is kOther.
InputUse UseIfPaired(const PlanInput& input, bool fits);

using FindNear = std::function<std::vector<NearParameter>(std::size_t output)>;
// As many free inputs become donors as outputs of their size have none.
StepPlan Plan(const GraphSizes& sizes, const std::vector<PlanInput>& inputs, const FindNear& near, bool keep_order);

}  // namespace torch_xla_donate
