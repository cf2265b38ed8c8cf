// A mutex whose use clang checks at compile time (-Wthread-safety in `make lint`). Other compilers see a plain mutex.
//
// Threads: any. Errors: none.
#pragma once

#include <condition_variable>
#include <mutex>

#include "host/process_mutex.h"

#if defined(__clang__)
#define TXD_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define TXD_THREAD_SAFETY(attribute)
#endif

#define CAPABILITY(name) TXD_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY TXD_THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(mutex) TXD_THREAD_SAFETY(guarded_by(mutex))
#define REQUIRES(mutex) TXD_THREAD_SAFETY(requires_capability(mutex))
#define EXCLUDES(mutex) TXD_THREAD_SAFETY(locks_excluded(mutex))
#define ACQUIRE(...) TXD_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TXD_THREAD_SAFETY(release_capability(__VA_ARGS__))

namespace torch_xla_donate {

class CAPABILITY("mutex") Mutex {
 public:
  explicit Mutex(std::mutex& mutex) noexcept : mutex_(mutex) {}
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  // Releases the mutex until `change` is notified. May also return without a notification.
  void Wait(std::condition_variable& change) REQUIRES(this) {
    std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
    change.wait(lock);
    lock.release();
  }

 private:
  std::mutex& mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// The mutex of this folder. It guards the marks, and the members of donors, steps and tallies that change.
inline Mutex registry_mutex{ProcessMutex(MutexOf::kRegistry)};

}  // namespace torch_xla_donate
