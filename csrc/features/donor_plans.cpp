// The choice among the dead inputs of a graph, and the plans that are kept.
#include "features/donor_plans.h"

#include <algorithm>
#include <utility>

#include "features/switches.h"
#include "host/array_text.h"

namespace torch_xla_donate {

namespace {

constexpr std::size_t kKnownDeadSets = 16;

bool IsSubset(const std::vector<std::size_t>& parameters, const std::vector<bool>& dead) {
  return std::all_of(parameters.begin(), parameters.end(), [&dead](std::size_t i) { return dead[i]; });
}

}  // namespace

DonorPlanner& DonorPlanner::Get() {
  static DonorPlanner* plans = new DonorPlanner();
  return *plans;
}

std::size_t DonorPlanner::Size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_.size();
}

std::vector<bool> FindFits(const PlanRequest& request, const GraphArrays& arrays) {
  const auto& bytes = arrays.bytes;
  FreeOutputs free(arrays.output_bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (request.donors[i]) {
      free.Take(bytes[i]);
    }
  }
  std::vector<bool> fits;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    fits.push_back(!arrays.dynamic && !request.donors[i] && bytes[i].value_or(0) > 0 && free.Count(bytes[i]) > 0);
  }
  return fits;
}

DonorPlanner::Plan DonorPlanner::Look(const PlanRequest& request) {
  Plan plan;
  plan.sizes = MeasureArrays(request.graph.parameters_data, request.roots, request.sharded);
  plan.fits = FindFits(request, plan.sizes);
  plan.arrays = std::make_shared<const std::vector<std::string>>(std::move(plan.sizes.arrays));
  return plan;
}

DonorPlanner::ChoicePtr DonorPlanner::Decide(const Plan& plan, const PlanRequest& request,
                                             const std::vector<bool>& dead) {
  auto choice = std::make_shared<DonorChoice>();
  choice->pairs =
      PairDonors({plan.sizes.bytes, plan.sizes.output_bytes, plan.sizes.movable, request.donors, dead, request.wanted,
                  NearParameters(request.graph.parameters_data, request.roots), KeepsOrder()});
  for (std::size_t i : choice->pairs.chosen) {
    const std::string& array = (*plan.arrays)[i];
    DonorArray donor(request.graph.parameters_data[i]->device());
    donor.automatic = true;
    donor.dtype = ElementType(array).value_or(at::ScalarType::Undefined);
    const std::vector<std::int64_t> sizes = SizesOf(array);
    donor.sizes.assign(sizes.begin(), sizes.end());
    donor.bytes = BytesPerDevice(WithoutLayout(array)).value_or(0);
    choice->bytes += plan.sizes.bytes[i].value_or(0);
    choice->prototypes.push_back(std::move(donor));
  }
  const std::vector<std::int64_t>& room = choice->pairs.room;
  for (const ArraySize& bytes : plan.sizes.bytes) {
    choice->has_room.push_back(std::find(room.begin(), room.end(), bytes.value_or(0)) != room.end());
  }
  return choice;
}

// The answer for a dead set that is not among the last kKnownDeadSets.
DonorPlanner::ChoicePtr DonorPlanner::Settle(Plan& plan, const PlanRequest& request, const std::vector<bool>& dead) {
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
    return adopt(Decide(plan, request, dead));
  }
  ChoicePtr best;
  for (const ChoicePtr& choice : plan.choices) {
    if (IsSubset(choice->pairs.chosen, dead) && (best == nullptr || choice->bytes > best->bytes)) {
      best = choice;
    }
  }
  if (best != nullptr && best->bytes > 0) {
    return best;
  }
  // No choice fits. In most loops the inputs that were dead every time stay dead. Adds at most two graphs.
  if (plan.choices.size() == kMaxChoices) {
    return adopt(Decide(plan, request, plan.always_dead));
  }
  return best != nullptr ? best : adopt(Decide(plan, request, std::vector<bool>(dead.size(), false)));
}

void DonorPlanner::Forget(lazy::hash_t key) {
  const auto found = plans_.find(key);
  parameters_ -= found->second.sizes.bytes.size();
  plans_.erase(found);
  order_.erase(std::find(order_.begin(), order_.end(), key));
}

void DonorPlanner::OfNoUse(lazy::hash_t plan, const std::vector<std::size_t>& parameters) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto entry = plans_.find(plan); entry != plans_.end()) {
    std::vector<bool>& fits = entry->second.fits;
    for (const std::size_t i : parameters) {
      if (i < fits.size()) {  // else another graph has this hash now
        fits[i] = false;
      }
    }
  }
}

std::vector<HeldInput> DonorPlanner::LastHeld() const {
  std::vector<HeldInput> result;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, left] : last_left_) {
    for (const bool by_tensor : {true, false}) {
      for (const Left::Input& input : left.inputs) {
        if (input.by_tensor == by_tensor) {
          const std::string array = WithoutLayout((*left.arrays)[input.parameter]);
          result.push_back({array, BytesPerDevice(array).value_or(0), device, by_tensor, input.buffer});
        }
      }
    }
  }
  return result;
}

void DonorPlanner::BeginStep(const lazy::BackendDevice& device) {
  std::map<lazy::BackendDevice, Left>::node_type before;  // released without the lock, as it may be large
  std::lock_guard<std::mutex> lock(mutex_);
  before = last_left_.extract(device);
}

PlanResult DonorPlanner::Choose(const PlanRequest& request) {
  std::vector<std::size_t> wanted;
  for (const auto& output : request.wanted) {
    wanted.push_back(output.has_value() ? *output + 1 : 0);
  }
  const std::vector<bool> kind = {request.automatic, request.sharded};
  lazy::hash_t key = lazy::HashCombine(request.hash, lazy::Hash(request.graph.parameter_sequence));
  key = lazy::HashCombine(key, lazy::HashCombine(lazy::Hash(request.donors), lazy::Hash(kind)));
  key = lazy::HashCombine(key, lazy::Hash(wanted));
  // A plan for all devices would settle on the dead sets of the device that is first.
  key = lazy::HashCombine(key, lazy::Hash(request.device.toString()));
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end() || found->second.sizes.bytes.size() != request.held.size() ||
      found->second.sizes.output_bytes.size() != request.roots.size()) {
    if (found != plans_.end()) {  // another graph has the same hash
      Forget(key);
    }
    found = plans_.emplace(key, Look(request)).first;
    order_.push_back(key);
    parameters_ += request.held.size();
    while (order_.size() > 1 && (order_.size() > kKeptPlans || parameters_ > kKeptParameters)) {
      Forget(order_.front());
    }
    found->second.always_dead.assign(request.held.size(), true);
  }
  Plan& plan = found->second;
  std::vector<bool> dead(request.held.size()), held(request.held.size());
  for (std::size_t i = 0; i < dead.size(); ++i) {
    const bool fits = request.automatic && plan.fits[i] && !request.barred[i];
    held[i] = fits && (request.held[i] || request.read_later[i]);
    dead[i] = fits && !held[i];
    if (!dead[i]) {
      plan.always_dead[i] = false;
    }
  }
  PlanResult answer{nullptr, key};
  const auto same = [&dead](const auto& entry) { return entry.first == dead; };
  const auto given = std::find_if(plan.by_dead.begin(), plan.by_dead.end(), same);
  if (given != plan.by_dead.end()) {
    answer.choice = given->second;
  } else {
    answer.choice = Settle(plan, request, dead);
    plan.by_dead.emplace_front(dead, answer.choice);
    if (plan.by_dead.size() > kKnownDeadSets) {
      plan.by_dead.pop_back();
    }
  }
  Left left{plan.arrays, {}};
  lock.unlock();
  if (!answer.choice->pairs.room.empty()) {
    for (std::size_t i = 0; i < held.size(); ++i) {
      if (held[i] && answer.choice->has_room[i]) {
        left.inputs.push_back({i, request.held[i], request.graph.parameters_data[i]});
      }
    }
  }
  if (!left.inputs.empty()) {
    lock.lock();
    last_left_.insert_or_assign(request.device, std::move(left));
  }
  return answer;
}

}  // namespace torch_xla_donate
