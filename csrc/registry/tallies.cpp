// Adds up steps, refusals and errors.
#include "registry/tallies.h"

#include <algorithm>

#include "registry/steps.h"

namespace torch_xla_donate {

void Tallies::Open(const std::shared_ptr<StepTally>& tally, bool all_threads) {
  MutexLock lock(registry_mutex);
  tally->thread = all_threads ? std::nullopt : std::optional(std::this_thread::get_id());
  open_.push_back(tally);
}

void Tallies::Close(const std::shared_ptr<StepTally>& tally) {
  MutexLock lock(registry_mutex);
  open_.erase(std::remove(open_.begin(), open_.end(), tally), open_.end());
}

std::pair<TallyCounts, std::vector<StepPtr>> Tallies::Read(const StepTally& tally) const {
  MutexLock lock(registry_mutex);
  return {tally.counts, tally.unusable};
}

void Tallies::NoteAutoRefusal(const Reason& reason) noexcept {
  MutexLock lock(registry_mutex);
  try {
    const bool fits = auto_refusals_.size() < kKeptTexts || auto_refusals_.count(reason) != 0;
    ++auto_refusals_[fits ? reason : Reason(reason.code)];
  } catch (const std::bad_alloc&) {
    NoteLoss();
  }
}

std::map<Reason, std::uint64_t> Tallies::AutoRefusals() const {
  MutexLock lock(registry_mutex);
  return auto_refusals_;
}

void Tallies::NoteError(const char* error) noexcept {
  MutexLock lock(registry_mutex);
  try {
    if (const auto known = errors_.find(error); known != errors_.end()) {
      ++known->second;
    } else if (errors_.size() < kKeptTexts) {
      errors_.emplace(error, 1);
    } else {
      NoteLoss();
    }
  } catch (const std::bad_alloc&) {
    NoteLoss();
  }
}

std::map<std::string, std::uint64_t> Tallies::Errors() const {
  MutexLock lock(registry_mutex);
  std::map<std::string, std::uint64_t> errors = errors_;
  if (other_errors_ > 0) {
    errors.emplace("errors without a text, for lack of memory or because there are too many", other_errors_);
  }
  return errors;
}

std::vector<std::weak_ptr<StepTally>> Tallies::OfThisThread() const {
  std::vector<std::weak_ptr<StepTally>> found;
  for (const std::shared_ptr<StepTally>& tally : open_) {
    if (tally->CountsThisThread()) {
      found.push_back(tally);
    }
  }
  return found;
}

void Tallies::CountPlainStep() {
  for (const std::shared_ptr<StepTally>& tally : open_) {
    if (tally->counts.steps > 0 && tally->CountsThisThread()) {
      ++tally->counts.plain_steps;
    }
  }
}

void Tallies::Count(const StepPtr& step, const std::vector<DonorPtr>& donors) {
  std::int64_t offered = 0, donated = 0;
  bool unusable = false;
  for (const DonorPtr& donor : donors) {
    const DonorStatus& status = donor->status;
    const std::int64_t bytes = donor->array.bytes;
    const bool used = status.state == DonorState::kDonated, automatic = donor->array.automatic;
    offered += used || !automatic ? bytes : 0;
    donated += used ? bytes : 0;
    unusable = unusable || !(used || automatic || status.reported);
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

}  // namespace torch_xla_donate
