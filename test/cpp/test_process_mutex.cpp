// Forks while other threads use the mutexes of the process.
#include <pthread.h>

#include <atomic>
#include <thread>

#include "check.h"
#include "host/process_mutex.h"

namespace torch_xla_donate {
namespace {

constexpr int kCount = static_cast<int>(MutexOf::kCount);

std::mutex& At(int place) { return ProcessMutex(static_cast<MutexOf>(place)); }

// By pthread, which defines the answer also for the thread that has locked the mutex.
int CountFree() {
  int count = 0;
  for (int place = 0; place < kCount; ++place) {
    if (pthread_mutex_trylock(At(place).native_handle()) == 0) {
      At(place).unlock();
      ++count;
    }
  }
  return count;
}

std::atomic<bool> fork_begins{false};
int free_at_fork = -1;

// Before the handlers of the mutexes are registered, so a fork calls this one after theirs.
[[gnu::constructor(101)]] void RegisterLast() {
  pthread_atfork([] { free_at_fork = CountFree(); }, nullptr, nullptr);
}

}  // namespace

TEST(the_forking_thread_holds_all_mutexes_when_it_forks) {
  CHECK(InChild([] { CHECK_EQ(CountFree(), kCount); }));
  CHECK_EQ(free_at_fork, 0);
  CHECK_EQ(CountFree(), kCount);
}

TEST(a_fork_waits_for_the_thread_that_holds_a_mutex) {
  pthread_atfork([] { fork_begins = true; }, nullptr, nullptr);  // a fork calls it first
  for (int place = 0; place < kCount; ++place) {
    fork_begins = false;
    std::atomic<bool> is_held{false};
    std::thread holder([&] {
      const std::lock_guard<std::mutex> lock(At(place));
      is_held = true;
      while (!fork_begins) std::this_thread::yield();
    });
    while (!is_held) std::this_thread::yield();
    CHECK(InChild([] { CHECK_EQ(CountFree(), kCount); }));
    holder.join();
    CHECK_EQ(free_at_fork, 0);
  }
}

}  // namespace torch_xla_donate
