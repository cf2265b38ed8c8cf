// The mutexes of the process. A forked child can use them.
//
// A fork copies only the thread that calls it. A mutex that another thread holds would stay locked in the child for
// ever. So a fork first locks all of these, in the order of the list, and then unlocks them in both processes.
//
// Threads: any. The forking thread may hold the GIL, so a thread that holds one of these takes no GIL and waits for
//   nothing, unless it releases the mutex. It may lock only those that come later in the list.
// Errors: none.
#pragma once

#include <mutex>

namespace torch_xla_donate {

enum class MutexOf {
  kRegistry,
  kDonorPlans,
  kOutdatedTensors,
  kWatchedInputs,
  kSwitches,
  kPlaceholders,
  kExecutables,
  kDataInfos,
  kCount
};

std::mutex& ProcessMutex(MutexOf what) noexcept;

}  // namespace torch_xla_donate
