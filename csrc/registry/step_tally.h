// Counts steps from the moment it is opened, beyond the steps that the registry keeps.
//
// Ownership: shared by its creator and the registry, while it is open.
// Threads: the registry's mutex guards every member.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "registry/thread_safety.h"

namespace torch_xla_donate {

struct Step;

// The registry's mutex. It guards the marks, and the members of donors, steps and tallies that change.
inline Mutex registry_mutex;

struct TallyCounts {
  std::uint64_t steps = 0;        // with donors
  std::uint64_t plain_steps = 0;  // without donors, after the first step with donors
  // Of marked donors and of the automatic ones that an output reused, in steps that have ended.
  std::int64_t offered_bytes = 0;
  std::int64_t donated_bytes = 0;
};

struct StepTally {
  static constexpr std::size_t kKeptUnusable = 4;

  std::optional<std::thread::id> thread GUARDED_BY(registry_mutex);  // whose steps it counts; nullopt for all threads
  TallyCounts counts GUARDED_BY(registry_mutex);
  // The first steps with a donor that needs a notice.
  std::vector<std::shared_ptr<Step>> unusable GUARDED_BY(registry_mutex);
};

}  // namespace torch_xla_donate
