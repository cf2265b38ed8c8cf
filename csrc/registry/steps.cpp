// The life of a step in the registry, from its claim to its outcome, and the snapshots for readers.
#include <algorithm>
#include <utility>

#include "host/array_text.h"
#include "host/graphs.h"
#include "registry/registry.h"

namespace torch_xla_donate {

namespace {

bool CountsThisThread(const StepTally& tally) REQUIRES(registry_mutex) {
  return !tally.thread.has_value() || *tally.thread == std::this_thread::get_id();
}

// Adds the outcomes of these donors, which are known.
void Count(const StepPtr& step, const std::vector<DonorPtr>& donors) REQUIRES(registry_mutex) {
  std::int64_t offered = 0, donated = 0;
  bool unusable = false;
  for (const DonorPtr& donor : donors) {
    const DonorStatus& status = donor->status;
    const bool used = status.state == DonorState::kDonated;
    offered += used || !donor->automatic ? donor->bytes : 0;
    donated += used ? donor->bytes : 0;
    unusable = unusable || !(used || donor->automatic || status.reported || status.IsSmall(donor->bytes));
  }
  for (const std::weak_ptr<StepTally>& weak : step->tallies) {
    const std::shared_ptr<StepTally> tally = weak.lock();
    if (tally == nullptr) {
      continue;
    }
    tally->counts.offered_bytes += offered;
    tally->counts.donated_bytes += donated;
    std::vector<StepPtr>& found = tally->unusable;
    if (unusable && found.size() < StepTally::kKeptUnusable &&
        std::find(found.begin(), found.end(), step) == found.end()) {
      found.push_back(step);
    }
  }
}

bool IsToReport(const std::vector<DonorPtr>& donors) REQUIRES(registry_mutex) {
  for (const DonorPtr& donor : donors) {
    const DonorStatus& status = donor->status;
    if (status.state == DonorState::kUnusable && !status.reported && status.Strict() > Strictness::kOff &&
        !status.IsSmall(donor->bytes)) {
      return true;
    }
  }
  return false;
}

// A copy whose code stays if there is no memory for its details.
void Set(Reason& reason, const Reason& value) noexcept {
  reason.code = value.code;
  try {
    reason.details = value.details;
  } catch (const std::bad_alloc&) {
    reason.details.clear();
  }
}

}  // namespace

DonationRegistry::Claimed DonationRegistry::Claim(const std::vector<Offer>& offers, std::vector<Refusal> refused,
                                                  bool after_backward_thread) {
  MutexLock lock(registry_mutex);
  return ClaimLocked(offers, std::move(refused), after_backward_thread);
}

DonationRegistry::Claimed DonationRegistry::ClaimLocked(const std::vector<Offer>& offers, std::vector<Refusal> refused,
                                                        bool after_backward_thread) {
  // Runs of compiled graphs do not call Sweep(), so freed buffers would slow down every look-up.
  if (consumed_.size() > remembered_ + offers.size()) {
    ForgetConsumed();
  }
  // Another thread may have cancelled marks since the caller found them.
  std::vector<const Offer*> left;
  std::vector<DonorPtr> donors, not_offered;
  for (const Offer& offer : offers) {
    if (offer.donor->status.state == DonorState::kPending) {
      left.push_back(&offer);
      donors.push_back(offer.donor);
    }
  }
  const auto is_over = [](const Refusal& refusal) REQUIRES(registry_mutex) {
    return refusal.donor->status.state != DonorState::kPending || refusal.donor->status.armed;
  };
  refused.erase(std::remove_if(refused.begin(), refused.end(), is_over), refused.end());
  for (const Refusal& refusal : refused) {
    not_offered.push_back(refusal.donor);
  }
  if (donors.empty() && not_offered.empty()) {
    return {};
  }
  auto step = std::make_shared<Step>(next_step_, std::move(donors), std::move(not_offered));
  step->after_backward_thread = after_backward_thread;
  step->used.resize(step->donors.size());
  for (const std::shared_ptr<StepTally>& tally : tallies_) {
    if (CountsThisThread(*tally)) {
      step->tallies.push_back(tally);
    }
  }
  std::vector<std::shared_ptr<abi::TensorData>> tensors;
  for (const DonorPtr& donor : step->donors) {
    AddTensorsOf(*donor, tensors);
  }
  std::size_t noted = 0;
  try {
    for (; noted < left.size(); ++noted) {
      const DonorPtr& donor = left[noted]->donor;
      if (!donor->automatic) {  // no tensor holds an automatic donor, so no use can be checked
        consumed_.insert_or_assign(donor->buffer.lock().get(), Consumed{donor, step});
      }
    }
  } catch (...) {
    while (noted-- > 0) {
      consumed_.erase(left[noted]->donor->buffer.lock().get());
    }
    throw;
  }
  // Nothing throws from here on.
  ++next_step_;
  last_claimed_ = step;
  has_steps_.store(true, std::memory_order_relaxed);
  for (const std::weak_ptr<StepTally>& tally : step->tallies) {
    ++tally.lock()->counts.steps;
  }
  for (OpenCall& call : OpenCalls()) {
    call.step = step;
  }
  for (const Offer* offer : left) {
    DonorStatus& status = offer->donor->status;
    status.state = DonorState::kClaimed;
    status.armed = false;
    status.parameter = offer->parameter;
    status.successor = offer->successor;
    status.requested = offer->requested;
    if (!offer->donor->automatic) {
      pending_.erase(offer->donor->buffer.lock().get());
    }
  }
  Refuse(refused);
  if (step->donors.empty()) {
    step->status = Step::Status::kDone;
    AddStep(step);
  }
  Refresh();
  return {step, std::move(tensors)};
}

void DonationRegistry::Refuse(std::vector<Refusal>& refused) noexcept {
  for (Refusal& refusal : refused) {
    DonorStatus& status = refusal.donor->status;
    status.state = DonorState::kUnusable;
    status.reason = std::move(refusal.reason);
    status.reported = !refusal.notify;
    pending_.erase(refusal.donor->buffer.lock().get());
  }
}

void DonationRegistry::AddUnread(const StepPtr& step, std::vector<Refusal> unread) {
  std::vector<DonorPtr> donors;
  for (const Refusal& refusal : unread) {
    donors.push_back(refusal.donor);
  }
  step->unread.insert(step->unread.end(), donors.begin(), donors.end());
  // Nothing throws from here on. The step may still run, and its end counts and reports its other donors.
  Refuse(unread);
  try {
    Count(step, donors);
    AddNotice(step, donors);
  } catch (const std::bad_alloc&) {
    ++other_errors_;
  }
}

std::vector<DonationRegistry::OpenCall>& DonationRegistry::OpenCalls() {
  thread_local std::vector<OpenCall> calls;
  while (!calls.empty() && calls.back().site.expired()) {  // an interrupt has ended it
    calls.pop_back();
  }
  return calls;
}

void DonationRegistry::BeginCall(const std::shared_ptr<const CallSite>& site) { OpenCalls().push_back({site, {}}); }

DonationRegistry::OpenCall* DonationRegistry::FindOpen(const CallSite* site) {
  for (OpenCall& call : OpenCalls()) {
    if (call.site.lock().get() == site) {
      return &call;
    }
  }
  return nullptr;
}

void DonationRegistry::CloseCall(OpenCall* call) noexcept {
  if (call == nullptr) {
    return;
  }
  try {
    if (call->has_plain_run && call->step == nullptr) {
      CountRunLocked(/*is_step=*/true);
    } else if (call->has_plain_run) {
      AddCompilations(call->step->compilations);
    }
  } catch (const std::bad_alloc&) {
    ++other_errors_;  // the report misses a step without donors
  }
  // With those that an interrupt has left open inside it.
  OpenCalls().erase(OpenCalls().begin() + (call - OpenCalls().data()), OpenCalls().end());
}

void DonationRegistry::AddNotice(const StepPtr& step, const std::vector<DonorPtr>& donors) {
  if (IsToReport(donors) && std::find(notices_.begin(), notices_.end(), step) == notices_.end()) {
    notices_.push_back(step);
  }
}

void DonationRegistry::AddStep(const StepPtr& step) noexcept {
  try {
    Count(step, step->donors);
    Count(step, step->refused);
    steps_.push_back(step);
    if (steps_.size() > kept_steps_) {
      steps_.pop_front();
    }
    AddNotice(step, step->donors);
    AddNotice(step, step->refused);
  } catch (const std::bad_alloc&) {
    ++other_errors_;  // the report misses the step
  }
}

void DonationRegistry::Commit(const StepPtr& step, std::string graph_hash,
                              const std::vector<lazy::BackendDataPtr>& outputs) {
  MutexLock lock(registry_mutex);
  step->outputs.assign(outputs.begin(), outputs.end());
  const auto known = outcomes_.find(graph_hash);
  if (known != outcomes_.end() && known->second->used.size() == step->donors.size()) {
    step->outcome = known->second;
    for (std::size_t i = 0; i < step->donors.size(); ++i) {
      step->donors[i]->status.left_unused = !known->second->used[i];
    }
  }
  step->graph_hash = std::move(graph_hash);
  AddCompilations(step->compilations);
  step->status = Step::Status::kRunning;
  ++running_;
}

void DonationRegistry::NoteExecutable(const StepPtr& step,
                                      const std::shared_ptr<const abi::HostCachedComputation>& executable) {
  MutexLock lock(registry_mutex);
  step->executable = executable;
}

std::optional<std::string> DonationRegistry::GraphText(const std::string& graph_hash) const {
  std::shared_ptr<const abi::HostCachedComputation> executable;
  {
    MutexLock lock(registry_mutex);
    const auto found = outcomes_.find(graph_hash);
    executable = found == outcomes_.end() ? nullptr : found->second->executable.lock();
  }
  return executable == nullptr ? std::nullopt : std::optional(abi::DescribeGraph(*executable).text);
}

std::shared_ptr<GraphOutcome> DonationRegistry::DescribeOutcome(const Step& step) const {
  auto outcome = std::make_shared<GraphOutcome>();
  outcome->used = step.used;
  std::vector<std::weak_ptr<lazy::BackendData>> outputs;
  {
    MutexLock lock(registry_mutex);
    if (step.outcome != nullptr && step.outcome->used == step.used) {
      return nullptr;
    }
    outcome->executable = step.executable;
    outputs = step.outputs;
  }
  const auto describe = [](const lazy::BackendDataPtr& buffer) {
    return buffer != nullptr ? abi::DescribeBuffer(*buffer) : std::string();
  };
  for (const DonorPtr& donor : step.donors) {
    const std::string array = describe(donor->buffer.lock());
    outcome->donors.push_back(IsSharded(array) ? array : std::string());
  }
  if (std::find(step.used.begin(), step.used.end(), false) != step.used.end()) {
    for (const auto& weak : outputs) {
      outcome->outputs.push_back(describe(weak.lock()));
    }
  }
  return outcome;
}

void DonationRegistry::RecordOutcome(const StepPtr& step, const Reason& failure) noexcept {
  // Before the lock is taken, because HasValue() calls the host.
  for (std::size_t i = 0; i < step->donors.size(); ++i) {
    const lazy::BackendDataPtr buffer = step->donors[i]->buffer.lock();
    // The running step holds its parameters, so the buffer exists. A missing one could not be used anyway.
    step->used[i] = buffer == nullptr || !buffer->HasValue();
  }
  std::shared_ptr<GraphOutcome> outcome;
  try {
    outcome = failure.empty() ? DescribeOutcome(*step) : nullptr;
  } catch (const std::exception& error) {  // a reason may lack a size, but the step must end
    NoteError(error.what());
  }
  MutexLock lock(registry_mutex);
  Finish(step, std::move(outcome), failure);
}

bool DonationRegistry::IsUnusable(const Donor& donor) const {
  MutexLock lock(registry_mutex);
  return donor.status.state == DonorState::kUnusable;
}

void DonationRegistry::Abandon(const StepPtr& step, const Reason& failure) noexcept {
  step->used.assign(step->donors.size(), false);
  MutexLock lock(registry_mutex);
  Finish(step, nullptr, failure);
}

void DonationRegistry::Finish(const StepPtr& step, std::shared_ptr<const GraphOutcome> outcome,
                              const Reason& failure) noexcept {
  if (step->status == Step::Status::kDone || step->status == Step::Status::kFailed) {
    return;  // a run that the host drops may end twice
  }
  const bool was_running = step->status == Step::Status::kRunning;
  if (!was_running) {
    AddCompilations(step->compilations);  // its compilation may have failed
  }
  for (std::size_t i = 0; i < step->donors.size(); ++i) {
    const Donor& donor = *step->donors[i];
    DonorStatus& status = step->donors[i]->status;
    status.state = step->used[i] ? DonorState::kDonated : DonorState::kUnusable;
    status.left_unused = false;
    if (step->used[i]) {
      continue;
    }
    consumed_.erase(donor.buffer.lock().get());
    if (!failure.empty()) {
      Set(status.reason, failure);
      status.reported = true;  // the failure itself is raised by torch_xla
    }
  }
  step->status = failure.empty() ? Step::Status::kDone : Step::Status::kFailed;
  step->outputs.clear();
  if (outcome != nullptr) {
    step->outcome = outcome;
    try {
      if (outcomes_.insert_or_assign(step->graph_hash, std::move(outcome)).second) {
        outcome_order_.push_back(step->graph_hash);
        if (outcome_order_.size() > kKeptOutcomes) {
          outcomes_.erase(outcome_order_.front());
          outcome_order_.pop_front();
        }
      }
    } catch (const std::bad_alloc&) {
      ++other_errors_;  // the next run of the graph computes the outcome again
    }
  }
  AddStep(step);
  if (was_running) {
    --running_;
  }
  Refresh();
  settled_.notify_all();
}

void DonationRegistry::NoteAutoRefusal(const Reason& reason) noexcept {
  MutexLock lock(registry_mutex);
  try {
    const bool fits = auto_refusals_.size() < kKeptTexts || auto_refusals_.count(reason) != 0;
    ++auto_refusals_[fits ? reason : Reason(reason.code)];
  } catch (const std::bad_alloc&) {
    ++other_errors_;
  }
}

std::map<Reason, std::uint64_t> DonationRegistry::AutoRefusals() const {
  MutexLock lock(registry_mutex);
  return auto_refusals_;
}

void DonationRegistry::NoteError(const char* error) noexcept {
  MutexLock lock(registry_mutex);
  try {
    if (const auto known = errors_.find(error); known != errors_.end()) {
      ++known->second;
    } else if (errors_.size() < kKeptTexts) {
      errors_.emplace(error, 1);
    } else {
      ++other_errors_;
    }
  } catch (const std::bad_alloc&) {
    ++other_errors_;
  }
}

std::map<std::string, std::uint64_t> DonationRegistry::Errors() const {
  MutexLock lock(registry_mutex);
  std::map<std::string, std::uint64_t> errors = errors_;
  if (other_errors_ > 0) {
    errors.emplace("errors without a text, for lack of memory or because there are too many", other_errors_);
  }
  return errors;
}

void DonationRegistry::WaitForSteps() {
  MutexLock lock(registry_mutex);
  while (running_ != 0) {
    registry_mutex.Wait(settled_);
  }
}

StepSnapshot DonationRegistry::Snapshot(const Step& step) const {
  static const char* const names[] = {"claimed", "running", "done", "failed"};
  StepSnapshot snapshot;
  snapshot.number = step.number;
  snapshot.graph_hash = step.graph_hash;
  snapshot.status = names[static_cast<int>(step.status)];
  snapshot.after_backward_thread = step.after_backward_thread;
  snapshot.compilations = step.compilations;
  snapshot.plain_steps = step.plain_steps;
  snapshot.donors.reserve(step.donors.size() + step.refused.size() + step.unread.size());
  for (const std::vector<DonorPtr>* donors : {&step.donors, &step.refused, &step.unread}) {
    for (const DonorPtr& donor : *donors) {
      snapshot.donors.emplace_back(*donor);
    }
  }
  if (step.outcome != nullptr) {
    snapshot.outputs = step.outcome->outputs;
    for (std::size_t i = 0; i < step.donors.size(); ++i) {
      snapshot.donors[i].array = step.outcome->donors[i];
    }
  }
  return snapshot;
}

std::vector<StepSnapshot> DonationRegistry::Steps() const {
  MutexLock lock(registry_mutex);
  std::vector<StepSnapshot> result;
  for (const StepPtr& step : steps_) {
    result.push_back(Snapshot(*step));
  }
  return result;
}

void DonationRegistry::SetKeptSteps(std::size_t count) {
  MutexLock lock(registry_mutex);
  kept_steps_ = std::max<std::size_t>(count, 1);
  while (steps_.size() > kept_steps_) {
    steps_.pop_front();
  }
}

void DonationRegistry::AddCompilations(std::uint64_t& counter) {
  const std::uint64_t now = abi::Compilations();
  counter += now < compilations_ ? now : now - compilations_;  // fewer if the program has cleared torch_xla's counters
  compilations_ = now;
}

void DonationRegistry::CountRun(bool is_step) {
  std::vector<OpenCall>& calls = OpenCalls();
  if (is_step && !calls.empty()) {
    calls.back().has_plain_run = true;
    return;
  }
  MutexLock lock(registry_mutex);
  CountRunLocked(is_step);
}

void DonationRegistry::CountRunLocked(bool is_step) {
  std::deque<std::uint64_t>& plain = last_claimed_->plain_steps;
  if (is_step) {
    plain.push_back(0);
  }
  AddCompilations(plain.empty() ? last_claimed_->compilations : plain.back());
  if (plain.size() > kept_steps_) {
    plain.pop_front();
  }
  if (!is_step) {
    return;
  }
  for (const std::shared_ptr<StepTally>& tally : tallies_) {
    if (tally->counts.steps > 0 && CountsThisThread(*tally)) {
      ++tally->counts.plain_steps;
    }
  }
}

void DonationRegistry::Open(const std::shared_ptr<StepTally>& tally, bool all_threads) {
  MutexLock lock(registry_mutex);
  tally->thread = all_threads ? std::nullopt : std::optional(std::this_thread::get_id());
  tallies_.push_back(tally);
}

void DonationRegistry::Close(const std::shared_ptr<StepTally>& tally) {
  MutexLock lock(registry_mutex);
  tallies_.erase(std::remove(tallies_.begin(), tallies_.end(), tally), tallies_.end());
}

std::pair<TallyCounts, std::vector<StepSnapshot>> DonationRegistry::Read(const StepTally& tally) const {
  MutexLock lock(registry_mutex);
  std::vector<StepSnapshot> unusable;
  for (const StepPtr& step : tally.unusable) {
    unusable.push_back(Snapshot(*step));
  }
  return {tally.counts, std::move(unusable)};
}

std::vector<DonorSnapshot> DonationRegistry::Pending() const {
  MutexLock lock(registry_mutex);
  std::vector<DonorSnapshot> result;
  for (const auto& entry : pending_) {
    if (!entry.second->buffer.expired()) {
      result.emplace_back(*entry.second);
    }
  }
  return result;
}

std::vector<StepSnapshot> DonationRegistry::TakeNotices(const std::optional<lazy::BackendDevice>& device) {
  MutexLock lock(registry_mutex);
  std::vector<StepSnapshot> result;
  std::deque<StepPtr> taken, others;
  for (const StepPtr& step : notices_) {
    const auto& donors = step->donors.empty() ? step->refused : step->donors;
    const bool is_other = device.has_value() && !(donors.front()->device == *device);
    (is_other ? others : taken).push_back(step);
    if (!is_other) {
      result.push_back(Snapshot(*step));
    }
  }
  for (const StepPtr& step : taken) {
    for (const std::vector<DonorPtr>* donors : {&step->donors, &step->refused, &std::as_const(step->unread)}) {
      for (const DonorPtr& donor : *donors) {
        donor->status.reported = donor->status.reported || donor->status.state == DonorState::kUnusable;
      }
    }
  }
  notices_ = std::move(others);
  Refresh();
  return result;
}

DonationRegistry::Counts DonationRegistry::Size() const {
  MutexLock lock(registry_mutex);
  return {pending_.size(), consumed_.size(), undonated_.size(), steps_.size(), outcomes_.size()};
}

}  // namespace torch_xla_donate
