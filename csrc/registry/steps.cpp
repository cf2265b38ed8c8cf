// The life of a step in the registry, from its claim to its outcome, and the snapshots for readers.
#include <algorithm>

#include "host/array_text.h"
#include "host/graphs.h"
#include "registry/registry.h"

namespace torch_xla_donate {

namespace {

bool CountsThisThread(const StepTally& tally) {
  return !tally.thread.has_value() || *tally.thread == std::this_thread::get_id();
}

// Adds the outcomes of a step that has ended.
void Count(const StepPtr& step) {
  std::int64_t offered = 0, donated = 0;
  bool unusable = false;
  for (const auto* donors : {&step->donors, &step->refused}) {
    for (const DonorPtr& donor : *donors) {
      const bool used = donor->state == DonorState::kDonated;
      offered += used || !donor->automatic ? donor->bytes : 0;
      donated += used ? donor->bytes : 0;
      unusable = unusable || !(used || donor->automatic || donor->reported || donor->IsSmall());
    }
  }
  for (const std::shared_ptr<StepTally>& tally : step->tallies) {
    tally->offered_bytes += offered;
    tally->donated_bytes += donated;
    if (unusable && tally->unusable.size() < StepTally::kKeptUnusable) {
      tally->unusable.push_back(step);
    }
  }
  step->tallies.clear();  // a kept step must not keep them alive
}

}  // namespace

StepPtr DonationRegistry::Claim(std::vector<DonorPtr> asked, std::vector<Refusal> refused, bool after_backward_thread) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ClaimLocked(std::move(asked), std::move(refused), after_backward_thread);
}

StepPtr DonationRegistry::ClaimLocked(std::vector<DonorPtr> asked, std::vector<Refusal> refused,
                                      bool after_backward_thread) {
  // Runs of compiled graphs do not call Sweep(), so freed buffers would slow down every look-up.
  if (consumed_.size() > remembered_ + asked.size()) {
    ForgetConsumed();
  }
  auto step = std::make_shared<Step>();
  step->number = next_step_++;
  step->after_backward_thread = after_backward_thread;
  last_claimed_ = step;
  has_steps_.store(true, std::memory_order_relaxed);
  for (const std::shared_ptr<StepTally>& tally : tallies_) {
    if (CountsThisThread(*tally)) {
      ++tally->steps;
      step->tallies.push_back(tally);
    }
  }
  for (const DonorPtr& donor : asked) {
    donor->state = DonorState::kClaimed;
    if (donor->automatic) {
      continue;  // no tensor holds it, so no use can be checked
    }
    const lazy::BackendData* buffer = donor->buffer.lock().get();
    pending_.erase(buffer);
    consumed_[buffer] = {donor, step};
  }
  for (auto& [donor, reason, notify] : refused) {
    donor->state = DonorState::kUnusable;
    donor->reason = std::move(reason);
    donor->reported = !notify;
    pending_.erase(donor->buffer.lock().get());
    step->refused.push_back(std::move(donor));
  }
  step->donors = std::move(asked);
  if (step->donors.empty()) {
    step->status = Step::Status::kDone;
    AddStep(step);
  }
  Refresh();
  return step;
}

void DonationRegistry::AddStep(const StepPtr& step) {
  Count(step);
  steps_.push_back(step);
  if (steps_.size() > kept_steps_) {
    steps_.pop_front();
  }
  const auto to_report = [](const DonorPtr& donor) {
    return donor->state == DonorState::kUnusable && !donor->reported && donor->Strict() > Strictness::kOff &&
           !donor->IsSmall();
  };
  if (std::any_of(step->donors.begin(), step->donors.end(), to_report) ||
      std::any_of(step->refused.begin(), step->refused.end(), to_report)) {
    notices_.push_back(step);
  }
}

void DonationRegistry::Commit(const StepPtr& step, std::string graph_hash,
                              const std::vector<lazy::BackendDataPtr>& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  step->graph_hash = std::move(graph_hash);
  AddCompilations(step->compilations);
  step->status = Step::Status::kRunning;
  ++running_;
  auto known = outcomes_.find(step->graph_hash);
  if (known != outcomes_.end() && known->second->used.size() == step->donors.size()) {
    step->outcome = known->second;
  } else {
    step->outputs.assign(outputs.begin(), outputs.end());
  }
}

void DonationRegistry::NoteExecutable(const StepPtr& step,
                                      const std::shared_ptr<const abi::HostCachedComputation>& executable) {
  std::lock_guard<std::mutex> lock(mutex_);
  step->executable = executable;
}

std::optional<std::string> DonationRegistry::GraphText(const std::string& graph_hash) const {
  std::shared_ptr<const abi::HostCachedComputation> executable;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = outcomes_.find(graph_hash);
    executable = found == outcomes_.end() ? nullptr : found->second->executable.lock();
  }
  return executable == nullptr ? std::nullopt : std::optional(abi::DescribeGraph(*executable).text);
}

void DonationRegistry::Settle(const StepPtr& step, const Reason& failure) {
  // Before the lock is taken, because HasValue() calls the host.
  std::vector<lazy::BackendDataPtr> buffers;
  std::vector<bool> used;
  buffers.reserve(step->donors.size());
  used.reserve(step->donors.size());
  for (const DonorPtr& donor : step->donors) {
    buffers.push_back(donor->buffer.lock());
    // The running step holds its parameters, so the buffer exists. A missing one could not be used anyway.
    used.push_back(buffers.back() == nullptr || !buffers.back()->HasValue());
  }
  const bool all_used = std::all_of(used.begin(), used.end(), [](bool value) { return value; });
  std::shared_ptr<GraphOutcome> outcome;
  if (failure.empty() && (step->outcome == nullptr || step->outcome->used != used)) {
    outcome = std::make_shared<GraphOutcome>();
    outcome->used = used;
    outcome->executable = step->executable;
    const auto describe = [](const lazy::BackendDataPtr& buffer) {
      try {
        return buffer != nullptr ? abi::DescribeBuffer(*buffer) : std::string();
      } catch (const std::exception&) {
        return std::string();  // a reason may lack a size, but the step must be settled
      }
    };
    for (const lazy::BackendDataPtr& buffer : buffers) {
      const std::string array = describe(buffer);
      outcome->donors.push_back(IsSharded(array) ? array : std::string());
    }
    if (!all_used) {
      for (const auto& weak : step->outputs) {
        outcome->outputs.push_back(describe(weak.lock()));
      }
    }
  }

  Finish(step, buffers, used, std::move(outcome), failure);
}

void DonationRegistry::Abandon(const StepPtr& step, const Reason& failure) {
  std::vector<lazy::BackendDataPtr> buffers;
  for (const DonorPtr& donor : step->donors) {
    buffers.push_back(donor->buffer.lock());
  }
  Finish(step, buffers, std::vector<bool>(buffers.size(), false), nullptr, failure);
}

void DonationRegistry::Finish(const StepPtr& step, const std::vector<lazy::BackendDataPtr>& buffers,
                              const std::vector<bool>& used, std::shared_ptr<const GraphOutcome> outcome,
                              const Reason& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool was_running = step->status == Step::Status::kRunning;
  if (!was_running) {
    AddCompilations(step->compilations);  // its compilation may have failed
  }
  for (std::size_t i = 0; i < step->donors.size(); ++i) {
    Donor& donor = *step->donors[i];
    donor.state = used[i] ? DonorState::kDonated : DonorState::kUnusable;
    if (used[i]) {
      continue;
    }
    consumed_.erase(buffers[i].get());
    if (!failure.empty()) {
      donor.reason = failure;
      donor.reported = true;  // the failure itself is raised by torch_xla
    }
  }
  step->status = failure.empty() ? Step::Status::kDone : Step::Status::kFailed;
  if (outcome != nullptr) {
    step->outcome = outcome;
    if (outcomes_.insert_or_assign(step->graph_hash, outcome).second) {
      outcome_order_.push_back(step->graph_hash);
      if (outcome_order_.size() > kKeptOutcomes) {
        outcomes_.erase(outcome_order_.front());
        outcome_order_.pop_front();
      }
    }
  }
  step->outputs.clear();
  AddStep(step);
  if (was_running) {
    --running_;
  }
  Refresh();
  settled_.notify_all();
}

void DonationRegistry::NoteAutoRefusal(const Reason& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++auto_refusals_[reason];
}

std::map<Reason, std::uint64_t> DonationRegistry::AutoRefusals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return auto_refusals_;
}

void DonationRegistry::NoteError(const char* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++errors_[error];
}

std::map<std::string, std::uint64_t> DonationRegistry::Errors() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return errors_;
}

void DonationRegistry::WaitForSteps() {
  std::unique_lock<std::mutex> lock(mutex_);
  settled_.wait(lock, [this] { return running_ == 0; });
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
  snapshot.donors.reserve(step.donors.size() + step.refused.size());
  for (const DonorPtr& donor : step.donors) {
    snapshot.donors.push_back(*donor);
  }
  for (const DonorPtr& donor : step.refused) {
    snapshot.donors.push_back(*donor);
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
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepSnapshot> result;
  for (const StepPtr& step : steps_) {
    result.push_back(Snapshot(*step));
  }
  return result;
}

void DonationRegistry::SetKeptSteps(std::size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
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
  std::lock_guard<std::mutex> lock(mutex_);
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
    if (tally->steps > 0 && CountsThisThread(*tally)) {
      ++tally->plain_steps;
    }
  }
}

void DonationRegistry::Open(const std::shared_ptr<StepTally>& tally) {
  std::lock_guard<std::mutex> lock(mutex_);
  tallies_.push_back(tally);
}

void DonationRegistry::Close(const std::shared_ptr<StepTally>& tally) {
  std::lock_guard<std::mutex> lock(mutex_);
  tallies_.erase(std::remove(tallies_.begin(), tallies_.end(), tally), tallies_.end());
}

std::pair<StepTally, std::vector<StepSnapshot>> DonationRegistry::Read(const StepTally& tally) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepSnapshot> unusable;
  for (const StepPtr& step : tally.unusable) {
    unusable.push_back(Snapshot(*step));
  }
  return {tally, std::move(unusable)};
}

std::vector<Donor> DonationRegistry::Pending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Donor> result;
  for (const auto& entry : pending_) {
    if (!entry.second->buffer.expired()) {
      result.push_back(*entry.second);
    }
  }
  return result;
}

std::vector<StepSnapshot> DonationRegistry::TakeNotices(const std::optional<lazy::BackendDevice>& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepSnapshot> result;
  std::deque<StepPtr> others;
  for (const StepPtr& step : notices_) {
    const auto& donors = step->donors.empty() ? step->refused : step->donors;
    if (device.has_value() && !(donors.front()->device == *device)) {
      others.push_back(step);
      continue;
    }
    result.push_back(Snapshot(*step));
    for (const auto* donors : {&step->donors, &step->refused}) {
      for (const DonorPtr& donor : *donors) {
        donor->reported = true;
      }
    }
  }
  notices_ = std::move(others);
  Refresh();
  return result;
}

DonationRegistry::Counts DonationRegistry::Size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {pending_.size(), consumed_.size(), spared_.size(), steps_.size(), outcomes_.size()};
}

}  // namespace torch_xla_donate
