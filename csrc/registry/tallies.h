// What is counted across steps, beyond the steps that are kept: the tallies of contexts and fixtures, the steps that
// automatic donation has skipped, and the errors after which a hook has continued.
//
// Ownership: a tally is shared by its creator and, while it is open, by this class and the steps that it counts.
// Threads: any thread may call any member. registry_mutex guards everything, also the members of a tally.
// Errors: Open(), OfThisThread(), Count() and the readers throw std::bad_alloc. The others throw nothing: without
//   memory, a text is counted without its words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host/never_destroyed.h"
#include "registry/donor.h"

namespace torch_xla_donate {

struct Step;

struct TallyCounts {
  std::uint64_t steps = 0;        // with donors
  std::uint64_t plain_steps = 0;  // without donors, after the first step with donors
  // Of marked donors and of the automatic ones that an output reused, in steps that have ended.
  std::int64_t offered_bytes = 0;
  std::int64_t donated_bytes = 0;
};

// Counts the steps that begin while it is open. The outcomes of those steps are added later, too.
struct StepTally {
  static constexpr std::size_t kKeptUnusable = 4;

  bool CountsThisThread() const REQUIRES(registry_mutex) {
    return !thread.has_value() || *thread == std::this_thread::get_id();
  }

  std::optional<std::thread::id> thread GUARDED_BY(registry_mutex);  // whose steps it counts; nullopt for all threads
  TallyCounts counts GUARDED_BY(registry_mutex);
  // The first steps with a donor that needs a notice.
  std::vector<std::shared_ptr<Step>> unusable GUARDED_BY(registry_mutex);
};

class Tallies {
 public:
  static Tallies& Get() { return NeverDestroyed<Tallies>(); }

  void Open(const std::shared_ptr<StepTally>& tally, bool all_threads);
  void Close(const std::shared_ptr<StepTally>& tally);
  // A copy that readers use without the lock, and the steps that it keeps.
  std::pair<TallyCounts, std::vector<std::shared_ptr<Step>>> Read(const StepTally& tally) const;

  // Automatic donation has skipped a step for this reason.
  void NoteAutoRefusal(const Reason& reason) noexcept;
  std::map<Reason, std::uint64_t> AutoRefusals() const;

  // A hook has continued without donation, or without a check, after this error.
  void NoteError(const char* error) noexcept;
  std::map<std::string, std::uint64_t> Errors() const;

  // ---- For the steps ----

  // The open tallies that count a step of this thread.
  std::vector<std::weak_ptr<StepTally>> OfThisThread() const REQUIRES(registry_mutex);
  // A step of this thread has no donors.
  void CountPlainStep() REQUIRES(registry_mutex);
  // Adds the outcomes of these donors of a step, which are known.
  static void Count(const std::shared_ptr<Step>& step, const std::vector<DonorPtr>& donors) REQUIRES(registry_mutex);
  // There was no memory for the text of an error, or for a step.
  void NoteLoss() noexcept REQUIRES(registry_mutex) { ++other_errors_; }

 private:
  static constexpr std::size_t kKeptTexts = 64;

  std::vector<std::shared_ptr<StepTally>> open_ GUARDED_BY(registry_mutex);
  // At most kKeptTexts each; the rest is counted without its text.
  std::map<Reason, std::uint64_t> auto_refusals_ GUARDED_BY(registry_mutex);
  std::map<std::string, std::uint64_t> errors_ GUARDED_BY(registry_mutex);
  std::uint64_t other_errors_ GUARDED_BY(registry_mutex) = 0;
};

}  // namespace torch_xla_donate
