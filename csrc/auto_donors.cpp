// Liveness of a step's parameters, and the choice among the dead ones.
#include "auto_donors.h"

#include <time.h>
#include <torch/csrc/lazy/backend/backend_interface.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "array_text.h"

namespace torch_xla_donate {

namespace {

// How far from an output's root a parameter is looked for, in nodes. Updates are short; what is farther away has no
// place where XLA could write over it early.
constexpr std::size_t kNodesPerOutput = 64;
constexpr std::size_t kKnownDeadSets = 16;

struct Pair {
  std::size_t distance, output, nearness, parameter;
  bool operator<(const Pair& other) const {
    return std::tie(distance, output, nearness) < std::tie(other.distance, other.output, other.nearness);
  }
};

// The parameters near an output's root, nearest first: the output is most likely their next value.
void FindNear(const lazy::Value& root, std::size_t output,
              const std::unordered_map<const lazy::BackendData*, std::size_t>& position_of, std::vector<Pair>& pairs) {
  std::queue<std::pair<const lazy::Node*, std::size_t>> open;
  std::set<const lazy::Node*> seen;
  const auto add = [&](const lazy::Node* node, std::size_t distance) {
    if (node != nullptr && seen.size() < kNodesPerOutput && seen.insert(node).second) {
      open.emplace(node, distance);
    }
  };
  add(root.node.get(), 0);
  for (std::size_t found = 0; !open.empty(); open.pop()) {
    const auto [node, distance] = open.front();
    if (const auto data = lazy::getBackend()->GetComputationDataFromNode(node); data != nullptr) {
      if (const auto position = position_of.find(data.get()); position != position_of.end()) {
        pairs.push_back({distance, output, found++, position->second});
      }
      continue;
    }
    for (const lazy::Output& operand : node->operands()) {
      add(operand.node, distance + 1);
    }
  }
}

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

OutdatedTensors& OutdatedTensors::Get() {
  static OutdatedTensors* tensors = new OutdatedTensors();
  return *tensors;
}

c10::intrusive_ptr<c10::BackendMeta> OutdatedTensors::Tag::clone(const c10::intrusive_ptr<c10::BackendMeta>&) const {
  return {};
}

void OutdatedTensors::Remember(const at::Tensor& tensor, const lazy::BackendDevice& device) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!abi::IsOutdated(impl)) {
    return;
  }
  // Others than torch_xla have functional tensors, too.
  const abi::TensorData* value = abi::ValueOf(impl);
  // What carries something like a tag already is known, or is left to whoever has put it there.
  if (value == nullptr || impl.get_backend_meta() != nullptr) {
    return;
  }
  impl.set_backend_meta(c10::make_intrusive<Tag>(&impl));
  std::lock_guard<std::mutex> lock(mutex_);
  tensors_.push_back({&impl, device});
  count_ = tensors_.size();
}

// To be let go of without the lock: the last owner of a tensor may take the GIL, and its tag takes the lock.
std::vector<c10::intrusive_ptr<c10::TensorImpl>> OutdatedTensors::Alive(const lazy::BackendDevice& device) const {
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> alive;
  if (count_ == 0) {
    return alive;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Known& entry : tensors_) {
    if (!(entry.device == device)) {
      continue;
    }
    // Its memory is there as long as its tag is, which waits for the lock; it may have begun to be destroyed.
    auto weak = c10::weak_intrusive_ptr<c10::TensorImpl>::reclaim(entry.tensor);
    if (auto tensor = weak.lock()) {
      alive.push_back(std::move(tensor));
    }
    weak.release();
  }
  return alive;
}

std::unordered_set<const abi::TensorData*> OutdatedTensors::Values(const lazy::BackendDevice& device, long holders) {
  std::unordered_set<const abi::TensorData*> values;
  for (const auto& tensor : Alive(device)) {
    if (const auto value = abi::OutdatedValue(*tensor, holders)) {
      values.insert(value.get());
    }
  }
  return values;
}

void OutdatedTensors::BringUpToDate(const lazy::BackendDevice& device) {
  for (const auto& tensor : Alive(device)) {
    try {
      abi::BringUpToDate(*tensor);
    } catch (const std::exception&) {
      // Whoever uses it next gets the error; the step must come to its end, and so must the ones after it.
      tensor->set_backend_meta({});
    }
  }
}

lazy::BackendDataPtr OutdatedTensors::Renew(const abi::TensorData& old_value) {
  for (const auto& tensor : Alive(old_value.device)) {
    if (abi::IsOutdated(*tensor) && abi::ValueOf(*tensor) == &old_value) {
      lazy::BackendDataPtr written = abi::WrittenBuffer(*tensor);
      abi::BringUpToDate(*tensor);
      const abi::TensorData* fresh = abi::ValueOf(*tensor);
      return fresh != nullptr && fresh->handle != nullptr ? fresh->handle : written;
    }
  }
  return nullptr;
}

void OutdatedTensors::Forget(const c10::TensorImpl* tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto is_it = [tensor](const Known& entry) { return entry.tensor == tensor; };
  tensors_.erase(std::remove_if(tensors_.begin(), tensors_.end(), is_it), tensors_.end());
  count_ = tensors_.size();
}

std::size_t OutdatedTensors::Size() const { return count_; }

bool SearchBudget::Allows() const {
  return std::chrono::steady_clock::now().time_since_epoch() >= std::chrono::nanoseconds(next_.load());
}

bool SearchBudget::Charge(const std::function<bool()>& search) {
  const auto own_time = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  const auto before = own_time();
  const bool found = search();
  const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
  next_ = (now + (found ? kPauseOfFinder : kPause) * (own_time() - before)).count();
  return found;
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
  // Under SPMD the compiler shards what nobody has; two arrays of one size then most often end up alike.
  const auto bytes_of = [&question](const std::string& array) {
    return BytesPerDevice(question.sharded ? WithoutLayout(array) : array);
  };
  Plan plan;
  std::vector<std::string> arrays;
  for (const lazy::BackendDataPtr& parameter : question.graph.parameters_data) {
    arrays.push_back(abi::DescribeBuffer(*parameter));
    plan.bytes.push_back(bytes_of(arrays.back()));
  }
  plan.arrays = std::make_shared<const std::vector<std::string>>(std::move(arrays));
  std::map<std::int64_t, std::int64_t> free;
  bool dynamic = false;
  for (const lazy::Value& root : question.roots) {
    const std::string array = abi::DescribeNode(root);
    dynamic = dynamic || IsDynamic(array);
    plan.output_bytes.push_back(bytes_of(array));
    if (plan.output_bytes.back().has_value()) {
      ++free[*plan.output_bytes.back()];
    }
  }
  for (std::size_t i = 0; i < plan.bytes.size(); ++i) {
    if (question.donors[i] && plan.bytes[i].has_value()) {
      --free[*plan.bytes[i]];
    }
  }
  for (std::size_t i = 0; i < plan.bytes.size(); ++i) {
    plan.fits.push_back(!dynamic && !question.donors[i] && plan.bytes[i].value_or(0) > 0 && free[*plan.bytes[i]] > 0);
  }
  return plan;
}

AutoPlans::ChoicePtr AutoPlans::Decide(const Plan& plan, const AutoQuestion& question, const std::vector<bool>& dead) {
  auto choice = std::make_shared<AutoChoice>();
  std::unordered_map<const lazy::BackendData*, std::size_t> position_of;
  for (std::size_t i = 0; i < dead.size(); ++i) {
    if (dead[i]) {
      position_of.emplace(question.graph.parameters_data[i].get(), i);
    }
  }
  // The donor of each output: first what is known, then neighbours, then whatever is left of its size.
  std::vector<std::optional<std::size_t>> donor_of(question.roots.size());
  std::vector<bool> taken(dead.size(), false);
  std::map<std::int64_t, std::int64_t> free;
  for (const auto& bytes : plan.output_bytes) {
    if (bytes.has_value()) {
      ++free[*bytes];
    }
  }
  for (std::size_t i = 0; i < dead.size(); ++i) {
    if (question.donors[i] && plan.bytes[i].has_value()) {
      --free[*plan.bytes[i]];
      if (question.output_replaced[i].has_value() && !donor_of[*question.output_replaced[i]].has_value()) {
        donor_of[*question.output_replaced[i]] = i;
      }
    }
  }
  const auto pair = [&](std::size_t output, std::size_t parameter) {
    const auto size = plan.bytes[parameter];
    if (donor_of[output].has_value() || taken[parameter] || plan.output_bytes[output] != size || free[*size] <= 0) {
      return;
    }
    donor_of[output] = parameter;
    taken[parameter] = true;
    --free[*size];
    choice->parameters.push_back(parameter);
    choice->bytes += *size;
  };
  std::vector<Pair> pairs;
  for (std::size_t output = 0; output < question.roots.size(); ++output) {
    if (!position_of.empty() && plan.output_bytes[output].has_value() && !donor_of[output].has_value()) {
      FindNear(question.roots[output], output, position_of, pairs);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  for (const Pair& found : pairs) {
    pair(found.output, found.parameter);
  }
  std::map<std::int64_t, std::deque<std::size_t>> left;
  for (std::size_t i = 0; i < dead.size(); ++i) {
    if (dead[i] && !taken[i]) {
      left[*plan.bytes[i]].push_back(i);
    }
  }
  for (std::size_t output = 0; output < question.roots.size(); ++output) {
    if (!plan.output_bytes[output].has_value() || donor_of[output].has_value()) {
      continue;
    }
    auto& rest = left[*plan.output_bytes[output]];
    if (!rest.empty()) {
      pair(output, rest.front());
      rest.pop_front();
    }
  }
  std::sort(choice->parameters.begin(), choice->parameters.end());
  for (const auto& [size, count] : free) {
    if (count > 0) {
      choice->room.push_back(size);
    }
  }
  if (position_of.empty()) {
    return choice;
  }

  if (question.orders) {
    // XLA goes through donors and outputs of a size in their order; left alone, the k-th gets the k-th.
    std::map<std::int64_t, std::vector<std::size_t>> donors_of_size;
    for (std::size_t i = 0; i < dead.size(); ++i) {
      if ((taken[i] || question.donors[i]) && plan.bytes[i].has_value()) {
        donors_of_size[*plan.bytes[i]].push_back(i);
      }
    }
    std::map<std::int64_t, std::size_t> next;
    bool as_it_is = true;
    for (std::size_t output = 0; output < donor_of.size(); ++output) {
      if (!plan.output_bytes[output].has_value()) {
        continue;
      }
      const auto& donors = donors_of_size[*plan.output_bytes[output]];
      const std::size_t k = next[*plan.output_bytes[output]]++;
      as_it_is = as_it_is && (k >= donors.size() || !donor_of[output].has_value() || donors[k] == *donor_of[output]);
      if (donor_of[output].has_value()) {
        choice->order.push_back(*donor_of[output]);
      }
    }
    if (as_it_is) {
      choice->order.clear();
    }
  }

  for (std::size_t i : choice->parameters) {
    const std::string& array = (*plan.arrays)[i];
    auto donor = std::make_shared<Donor>(question.graph.parameters_data[i]->device());
    donor->automatic = true;
    donor->told = true;
    donor->dtype = ElementType(array).value_or(at::ScalarType::Undefined);
    const std::vector<std::int64_t> sizes = SizesOf(array);
    donor->sizes.assign(sizes.begin(), sizes.end());
    donor->bytes = BytesPerDevice(WithoutLayout(array)).value_or(0);
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

void AutoPlans::Searched(const AutoSearch& search, bool found) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = plans_.find(search.plan);
  if (entry == plans_.end() || entry->second.in_vain.size() != search.held.size()) {
    return;
  }
  Plan& plan = entry->second;
  plan.has_helped = found;
  if (found) {
    plan.pause = kFirstPause;
    return;
  }
  if (search.stage == AutoSearch::kStages) {
    plan.wait = plan.pause;
    plan.pause *= kPauseGrowth;
  }
  for (std::size_t i = 0; i < search.held.size(); ++i) {
    if (search.held[i] && plan.in_vain[i] < search.stage) {
      plan.in_vain[i] = static_cast<std::uint8_t>(search.stage);
    }
  }
}

void AutoPlans::Forget(lazy::hash_t key) {
  const auto found = plans_.find(key);
  parameters_ -= found->second.bytes.size();
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
        if (const auto& room = left.choice->room; std::find(room.begin(), room.end(), bytes) != room.end()) {
          result.push_back({array, bytes, device, by_tensor});
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
  const std::vector<bool> kind = {question.orders, question.sharded};
  lazy::hash_t key = lazy::HashCombine(question.hash, lazy::Hash(question.graph.parameter_sequence));
  key = lazy::HashCombine(key, lazy::HashCombine(lazy::Hash(question.donors), lazy::Hash(kind)));
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end() || found->second.bytes.size() != question.held.size() ||
      found->second.output_bytes.size() != question.roots.size()) {
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
    found->second.in_vain.assign(question.held.size(), 0);
  }
  Plan& plan = found->second;
  std::vector<bool> dead(question.held.size()), held(question.held.size());
  Left left;
  std::size_t stage = AutoSearch::kStages;
  for (std::size_t i = 0; i < dead.size(); ++i) {
    const bool fits = plan.fits[i] && !question.barred[i];
    held[i] = fits && (question.held[i] || question.read_later[i]);
    dead[i] = fits && !held[i];
    if (!dead[i]) {
      plan.always_dead[i] = false;
    }
    if (plan.has_helped && !held[i]) {
      plan.in_vain[i] = 0;
    }
    if (held[i]) {
      (question.held[i] ? left.held : left.read_later).push_back(i);
      stage = std::min<std::size_t>(stage, plan.in_vain[i]);
    }
  }
  plan.has_helped = false;
  const bool any_held = !left.held.empty() || !left.read_later.empty();
  AutoAnswer answer{nullptr, key, std::nullopt};
  if (stage < AutoSearch::kStages) {
    answer.search = AutoSearch{key, std::move(held), stage};
  } else if (any_held && plan.wait == 0) {
    answer.search = AutoSearch{key, std::move(held), AutoSearch::kStages - 1};
  } else if (any_held) {
    --plan.wait;
  }
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
  if (any_held) {
    left.arrays = plan.arrays;
    left.choice = answer.choice;
    last_left_.insert_or_assign(question.device, std::move(left));
  }
  return answer;
}

}  // namespace torch_xla_donate
