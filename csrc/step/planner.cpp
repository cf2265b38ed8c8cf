// The choice among the free inputs of a graph, and the plans that are kept.
#include "step/planner.h"

#include <algorithm>
#include <utility>

#include "host/array_text.h"
#include "registry/steps.h"

namespace torch_xla_donate {

namespace {

constexpr std::size_t kKnownSets = 16;

bool IsSubset(const std::vector<std::size_t>& parameters, const std::vector<bool>& free) {
  return std::all_of(parameters.begin(), parameters.end(), [&free](std::size_t i) { return free[i]; });
}

// Of the memory. lazy::Hash() of a vector hashes and combines each element by itself.
lazy::hash_t HashOf(const std::vector<std::size_t>& values) {
  return lazy::DataHash(values.data(), values.size() * sizeof(std::size_t));
}

}  // namespace

std::size_t DonorPlanner::Size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_.size();
}

DonorPlanner::KeptPlan DonorPlanner::Look(const StepFacts& step) {
  GraphArrays arrays = step.Measure();
  KeptPlan plan;
  plan.fits = FindFits(arrays, step.inputs);
  plan.arrays = std::make_shared<const std::vector<std::string>>(std::move(arrays.arrays));
  plan.sizes = std::move(arrays);
  plan.always_free.assign(step.inputs.size(), true);
  return plan;
}

DonorPlanner::ChoicePtr DonorPlanner::Decide(const KeptPlan& plan, const StepFacts& step,
                                             const std::vector<bool>& free) {
  StepFacts limited = step;
  for (std::size_t i = 0; i < free.size(); ++i) {
    PlanInput& input = limited.inputs[i];
    input.is_barred = !free[i];
    input.is_held = input.is_read_later = false;
  }
  auto choice = std::make_shared<DonorChoice>();
  choice->pairs = limited.PlanFor(plan.sizes).pairs;
  for (std::size_t i : choice->pairs.chosen) {
    choice->sizes.push_back(SizesOf((*plan.arrays)[i]));
    choice->bytes += plan.sizes.bytes[i].value_or(0);
  }
  return choice;
}

// The answer for a set of free inputs that is not among the last kKnownSets.
DonorPlanner::ChoicePtr DonorPlanner::ChooseFallback(KeptPlan& plan, const StepFacts& step,
                                                     const std::vector<bool>& free) {
  const auto adopt = [&plan](ChoicePtr made) {
    const auto same = [&made](const ChoicePtr& other) { return other->pairs.chosen == made->pairs.chosen; };
    const auto found = std::find_if(plan.choices.begin(), plan.choices.end(), same);
    if (found != plan.choices.end()) {
      return *found;
    }
    plan.choices.push_back(made);
    return made;
  };
  if (plan.choices.size() < kMaxChoices) {
    return adopt(Decide(plan, step, free));
  }
  ChoicePtr best;
  for (const ChoicePtr& choice : plan.choices) {
    if (IsSubset(choice->pairs.chosen, free) && (best == nullptr || choice->bytes > best->bytes)) {
      best = choice;
    }
  }
  if (best != nullptr && best->bytes > 0) {
    return best;
  }
  // No choice fits. In most loops the inputs that were free every time stay free. Adds at most two graphs.
  if (plan.choices.size() == kMaxChoices) {
    return adopt(Decide(plan, step, plan.always_free));
  }
  return best != nullptr ? best : adopt(Decide(plan, step, std::vector<bool>(free.size(), false)));
}

void DonorPlanner::Forget(lazy::hash_t key) {
  const auto found = plans_.find(key);
  parameters_ -= found->second.sizes.bytes.size();
  plans_.erase(found);
  order_.erase(std::find(order_.begin(), order_.end(), key));
}

void DonorPlanner::Learn(const PlanResult& plan, const std::vector<DonorPtr>& donors) {
  if (multi_process_.load(std::memory_order_relaxed)) {
    return;
  }
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < donors.size(); ++i) {
    if (Steps::Get().IsUnusable(*donors[i])) {
      unused.push_back(plan.choice->pairs.chosen[i]);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto entry = plans_.find(plan.plan); entry != plans_.end()) {
    std::vector<bool>& fits = entry->second.fits;
    for (const std::size_t i : unused) {
      if (i < fits.size()) {  // else another graph has this hash now
        fits[i] = false;
      }
    }
  }
}

std::vector<HeldInput> DonorPlanner::LastHeld() const {
  std::vector<HeldInput> result;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, held] : last_held_) {
    result.insert(result.end(), held.begin(), held.end());
  }
  return result;
}

void DonorPlanner::BeginStep(const lazy::BackendDevice& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_held_.erase(device);
}

PlanResult DonorPlanner::Choose(const StepFacts& step) {
  const std::size_t count = step.inputs.size();
  std::vector<std::size_t> facts;
  facts.reserve(count + 2);
  facts.push_back(step.automatic ? 1 : 0);
  facts.push_back(step.sharded ? 1 : 0);
  for (const PlanInput& input : step.inputs) {
    const std::size_t output = input.preferred_output.has_value() ? *input.preferred_output + 1 : 0;
    facts.push_back(2 * output + (input.IsDonor() ? 1 : 0));
  }
  lazy::hash_t key = lazy::HashCombine(step.hash, HashOf(step.graph.parameter_sequence));
  key = lazy::HashCombine(key, HashOf(facts));
  // A plan for all devices would keep the choices of the device that is first.
  key = lazy::HashCombine(key, lazy::MHash(static_cast<std::int64_t>(step.device.type()), step.device.ordinal()));
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end() || found->second.sizes.bytes.size() != count ||
      found->second.sizes.output_bytes.size() != step.roots.size()) {
    if (found != plans_.end()) {  // another graph has the same hash
      Forget(key);
    }
    KeptPlan made = Look(step);
    order_.push_back(key);
    try {
      found = plans_.emplace(key, std::move(made)).first;
    } catch (...) {
      order_.pop_back();
      throw;
    }
    parameters_ += count;
    while (order_.size() > 1 && (order_.size() > kKeptPlans || parameters_ > kKeptParameters)) {
      Forget(order_.front());
    }
  }
  KeptPlan& plan = found->second;
  std::vector<bool> free(count), held(count);
  for (std::size_t i = 0; i < count; ++i) {
    const InputUse use = UseIfPaired(step.inputs[i], step.automatic && plan.fits[i]);
    free[i] = use == InputUse::kFree;
    held[i] = use == InputUse::kHeld || use == InputUse::kReadLater;
    if (!free[i]) {
      plan.always_free[i] = false;
    }
  }
  PlanResult answer{nullptr, key};
  const auto same = [&free](const auto& entry) { return entry.first == free; };
  const auto given = std::find_if(plan.by_free.begin(), plan.by_free.end(), same);
  if (given != plan.by_free.end()) {
    answer.choice = given->second;
  } else {
    answer.choice = ChooseFallback(plan, step, free);
    plan.by_free.emplace_front(free, answer.choice);
    if (plan.by_free.size() > kKnownSets) {
      plan.by_free.pop_back();
    }
  }
  const auto arrays = plan.arrays;
  lock.unlock();
  std::vector<HeldInput> left;
  for (std::size_t i = 0; i < count; ++i) {
    if (held[i] && answer.choice->pairs.has_room[i]) {
      left.push_back({arrays, i, step.device, step.inputs[i].is_held, step.graph.parameters_data[i]});
    }
  }
  if (!left.empty()) {
    std::stable_partition(left.begin(), left.end(), [](const HeldInput& input) { return input.by_tensor; });
    lock.lock();
    last_held_.insert_or_assign(step.device, std::move(left));
  }
  return answer;
}

}  // namespace torch_xla_donate
