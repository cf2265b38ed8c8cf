// Liveness of a step's parameters, and the choice among the dead ones.
#include "features/auto_donors.h"

#include <torch/csrc/lazy/backend/backend_interface.h>

#include <algorithm>
#include <map>
#include <utility>

#include "host/array_text.h"

namespace torch_xla_donate {

namespace {

constexpr std::size_t kKnownDeadSets = 16;

bool IsSubset(const std::vector<std::size_t>& parameters, const std::vector<bool>& dead) {
  return std::all_of(parameters.begin(), parameters.end(), [&dead](std::size_t i) { return dead[i]; });
}

}  // namespace

Liveness::Liveness(const std::vector<lazy::BackendDataPtr>& parameters)
    : held_(parameters.size(), false), read_(parameters.size(), false) {
  position_of_.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    position_of_.emplace(parameters[i].get(), i);
  }
}

void Liveness::Hold(const lazy::BackendData* buffer) {
  if (const auto found = position_of_.find(buffer); found != position_of_.end()) {
    held_[found->second] = true;
  }
}

void Liveness::HoldGraph(const lazy::Value& root) {
  std::vector<const lazy::Node*> open = {root.node.get()};
  while (!open.empty()) {
    const lazy::Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen_.insert(node).second) {
      continue;
    }
    const lazy::BackendDataPtr data = lazy::getBackend()->GetComputationDataFromNode(node);
    if (const auto found = position_of_.find(data.get()); found != position_of_.end()) {
      read_[found->second] = true;
    }
    for (const lazy::Output& operand : node->operands()) {
      open.push_back(operand.node);
    }
  }
}

AutoPlans& AutoPlans::Get() {
  static AutoPlans* plans = new AutoPlans();
  return *plans;
}

std::size_t AutoPlans::Size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_.size();
}

AutoPlans::Plan AutoPlans::Look(const AutoQuestion& question) {
  Plan plan;
  plan.sizes = MeasureArrays(question.graph.parameters_data, question.roots, question.sharded);
  plan.arrays = std::make_shared<const std::vector<std::string>>(std::move(plan.sizes.arrays));
  const auto& bytes = plan.sizes.bytes;
  std::map<std::int64_t, std::int64_t> free;
  for (const auto& size : plan.sizes.output_bytes) {
    free[size.value_or(0)] += size.has_value() ? 1 : 0;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    free[bytes[i].value_or(0)] -= question.donors[i] && bytes[i].has_value() ? 1 : 0;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    plan.fits.push_back(!plan.sizes.dynamic && !question.donors[i] && bytes[i].value_or(0) > 0 && free[*bytes[i]] > 0);
  }
  return plan;
}

AutoPlans::ChoicePtr AutoPlans::Decide(const Plan& plan, const AutoQuestion& question, const std::vector<bool>& dead) {
  auto choice = std::make_shared<AutoChoice>();
  choice->pairs = PairDonors({question.graph.parameters_data, question.roots, plan.sizes.bytes, plan.sizes.output_bytes,
                              plan.sizes.movable, question.donors, dead, question.wanted});
  choice->parameters = choice->pairs.chosen;
  for (std::size_t i : choice->parameters) {
    const std::string& array = (*plan.arrays)[i];
    auto donor = std::make_shared<Donor>(question.graph.parameters_data[i]->device());
    donor->automatic = true;
    donor->told = true;
    donor->dtype = ElementType(array).value_or(at::ScalarType::Undefined);
    const std::vector<std::int64_t> sizes = SizesOf(array);
    donor->sizes.assign(sizes.begin(), sizes.end());
    donor->bytes = BytesPerDevice(WithoutLayout(array)).value_or(0);
    choice->bytes += plan.sizes.bytes[i].value_or(0);
    choice->prototypes.push_back(std::move(donor));
  }
  return choice;
}

// The answer for a dead set that has not been seen lately.
AutoPlans::ChoicePtr AutoPlans::Settle(Plan& plan, const AutoQuestion& question, const std::vector<bool>& dead) {
  const auto adopt = [&plan](ChoicePtr made) {
    const auto same = [&made](const ChoicePtr& other) { return other->parameters == made->parameters; };
    const auto found = std::find_if(plan.choices.begin(), plan.choices.end(), same);
    if (found != plan.choices.end()) {
      return *found;
    }
    plan.choices.push_back(made);
    return made;
  };
  if (plan.choices.size() < kMaxChoices) {
    return adopt(Decide(plan, question, dead));
  }
  ChoicePtr best;
  for (const ChoicePtr& choice : plan.choices) {
    if (IsSubset(choice->parameters, dead) && (best == nullptr || choice->bytes > best->bytes)) {
      best = choice;
    }
  }
  if (best != nullptr && best->bytes > 0) {
    return best;
  }
  // Nothing fits. What has been dead every time will do for good, in most loops; two more graphs at the most.
  if (plan.choices.size() == kMaxChoices) {
    return adopt(Decide(plan, question, plan.always_dead));
  }
  return best != nullptr ? best : adopt(Decide(plan, question, std::vector<bool>(dead.size(), false)));
}

void AutoPlans::Forget(lazy::hash_t key) {
  const auto found = plans_.find(key);
  parameters_ -= found->second.sizes.bytes.size();
  plans_.erase(found);
  order_.erase(std::find(order_.begin(), order_.end(), key));
}

void AutoPlans::OfNoUse(lazy::hash_t plan, const std::vector<std::size_t>& parameters) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto entry = plans_.find(plan); entry != plans_.end()) {
    std::vector<bool>& fits = entry->second.fits;
    for (const std::size_t i : parameters) {
      if (i < fits.size()) {  // else another graph has come to have this hash
        fits[i] = false;
      }
    }
  }
}

std::vector<HeldInput> AutoPlans::LastHeld() const {
  std::vector<HeldInput> result;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, left] : last_left_) {
    for (const bool by_tensor : {true, false}) {
      for (const std::size_t i : by_tensor ? left.held : left.read_later) {
        const std::string array = WithoutLayout((*left.arrays)[i]);
        const std::int64_t bytes = BytesPerDevice(array).value_or(0);
        if (const auto& room = left.choice->pairs.room; std::find(room.begin(), room.end(), bytes) != room.end()) {
          result.push_back({array, bytes, device, by_tensor, left.buffers.at(i)});
        }
      }
    }
  }
  return result;
}

void AutoPlans::BeginStep(const lazy::BackendDevice& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_left_.erase(device);
}

AutoAnswer AutoPlans::Choose(const AutoQuestion& question) {
  std::vector<std::size_t> wanted;
  for (const auto& output : question.wanted) {
    wanted.push_back(output.has_value() ? *output + 1 : 0);
  }
  const std::vector<bool> kind = {question.automatic, question.sharded};
  lazy::hash_t key = lazy::HashCombine(question.hash, lazy::Hash(question.graph.parameter_sequence));
  key = lazy::HashCombine(key, lazy::HashCombine(lazy::Hash(question.donors), lazy::Hash(kind)));
  key = lazy::HashCombine(key, lazy::Hash(wanted));
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end() || found->second.sizes.bytes.size() != question.held.size() ||
      found->second.sizes.output_bytes.size() != question.roots.size()) {
    if (found != plans_.end()) {  // another graph has the same hash
      Forget(key);
    }
    found = plans_.emplace(key, Look(question)).first;
    order_.push_back(key);
    parameters_ += question.held.size();
    while (order_.size() > 1 && (order_.size() > kKeptPlans || parameters_ > kKeptParameters)) {
      Forget(order_.front());
    }
    found->second.always_dead.assign(question.held.size(), true);
  }
  Plan& plan = found->second;
  std::vector<bool> dead(question.held.size());
  Left left;
  for (std::size_t i = 0; i < dead.size(); ++i) {
    const bool fits = question.automatic && plan.fits[i] && !question.barred[i];
    const bool held = fits && (question.held[i] || question.read_later[i]);
    dead[i] = fits && !held;
    if (!dead[i]) {
      plan.always_dead[i] = false;
    }
    if (held) {
      (question.held[i] ? left.held : left.read_later).push_back(i);
    }
  }
  AutoAnswer answer{nullptr, key};
  const auto same = [&dead](const auto& entry) { return entry.first == dead; };
  const auto given = std::find_if(plan.by_dead.begin(), plan.by_dead.end(), same);
  if (given != plan.by_dead.end()) {
    answer.choice = given->second;
  } else {
    answer.choice = Settle(plan, question, dead);
    plan.by_dead.emplace_front(dead, answer.choice);
    if (plan.by_dead.size() > kKnownDeadSets) {
      plan.by_dead.pop_back();
    }
  }
  if (!left.held.empty() || !left.read_later.empty()) {
    left.arrays = plan.arrays;
    left.choice = answer.choice;
    for (const auto* places : {&left.held, &left.read_later}) {
      for (const std::size_t i : *places) {
        left.buffers.emplace(i, question.graph.parameters_data[i]);
      }
    }
    last_left_.insert_or_assign(question.device, std::move(left));
  }
  return answer;
}

}  // namespace torch_xla_donate
