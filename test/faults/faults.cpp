// Faults in the hooks, on request: an allocation that fails, a phase that throws, a signal, or a call of the
// program. Only the build of `make faults` has this file; test/faults/run.py calls it through ctypes.
//
// Threads: any. The request holds for the process.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "step/phases.h"

namespace {

// Allocations of this module until the one that fails; negative if none fails.
std::atomic<long> allocations_left{-1};

// Functions whose allocations do not fail, as offsets in this module. Set once, before the first request.
struct Range {
  std::uintptr_t begin, end;
};
constexpr std::size_t kMostSpared = 64;
Range spared[kMostSpared];
std::size_t spared_count = 0;

std::uintptr_t ModuleBase() {
  static const std::uintptr_t base = [] {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(&ModuleBase), &info) != 0 ? reinterpret_cast<std::uintptr_t>(info.dli_fbase)
                                                                    : 0;
  }();
  return base;
}

bool IsSpared(const void* caller) {
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(caller) - ModuleBase();
  return std::any_of(spared, spared + spared_count,
                     [offset](const Range& range) { return range.begin <= offset && offset < range.end; });
}

enum class Action { kNone, kThrow, kInterrupt, kCall };
std::atomic<const char*> phase{nullptr};
std::atomic<Action> action{Action::kNone};
std::atomic<void (*)()> program{nullptr};

// Acts once, when the hooks reach the requested phase.
void Reach(const char* name) {
  const char* const wanted = phase.load();
  if (wanted == nullptr || std::strcmp(wanted, name) != 0) {
    return;
  }
  switch (action.exchange(Action::kNone)) {
    case Action::kNone: return;
    case Action::kThrow: throw std::runtime_error(std::string("injected in ") + name);
    case Action::kInterrupt: std::raise(SIGINT); return;
    case Action::kCall: program.load()(); return;
  }
}

}  // namespace

// The linker sends this module's calls of operator new here (-Wl,--wrap).
extern "C" {
void* __real__Znwm(std::size_t size);
void* __wrap__Znwm(std::size_t size) {
  if (allocations_left.load(std::memory_order_relaxed) >= 0 && !IsSpared(__builtin_return_address(0)) &&
      allocations_left.fetch_sub(1) == 0) {
    throw std::bad_alloc();
  }
  return __real__Znwm(size);
}

// Allocations in a function at these offsets do not fail.
[[gnu::visibility("default")]] void torch_xla_donate_spare(std::uintptr_t begin, std::uintptr_t end) {
  if (spared_count < kMostSpared) {
    spared[spared_count++] = {begin, end};
  }
}

// The allocation after `count` others fails; negative for none. Returns how many are left of the request before.
[[gnu::visibility("default")]] long torch_xla_donate_fail_allocation(long count) {
  return allocations_left.exchange(count);
}

// At the phase, a function of step/phases.h or "OnEnd", does what Action says. Returns whether the request before is
// still waiting.
[[gnu::visibility("default")]] bool torch_xla_donate_fault_at(const char* name, int what, void (*call)()) {
  static char kept[64];
  const bool waits = action.exchange(Action::kNone) != Action::kNone;
  std::strncpy(kept, name, sizeof kept - 1);
  phase = kept;
  program = call;
  action = static_cast<Action>(what);
  return waits;
}
}

void torch_xla_donate::phases::Reach(const char* phase) { ::Reach(phase); }
