// All mutexes in one array, and the handlers of a fork.
#include "host/process_mutex.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace torch_xla_donate {

namespace {

// Usable before and after the life of any other object, as neither constructor nor destructor runs code.
std::array<std::mutex, static_cast<std::size_t>(MutexOf::kCount)> mutexes;

void LockAll() {
  std::for_each(mutexes.begin(), mutexes.end(), [](std::mutex& mutex) { mutex.lock(); });
}

void UnlockAll() {
  std::for_each(mutexes.rbegin(), mutexes.rend(), [](std::mutex& mutex) { mutex.unlock(); });
}

[[maybe_unused]] const int registered = pthread_atfork(&LockAll, &UnlockAll, &UnlockAll);

}  // namespace

std::mutex& ProcessMutex(MutexOf what) noexcept { return mutexes[static_cast<std::size_t>(what)]; }

}  // namespace torch_xla_donate
