// One row of the table of hooks, and the pointer by which a hook reaches the function whose place it has taken.
#pragma once

#include <atomic>
#include <vector>

namespace torch_xla_donate {

// Published before the first slot is patched, and never reset: a thread may be inside the hook while it is undone.
struct Original {
  std::atomic<void*> address{nullptr};
  template <typename Function>
  Function As() const {
    return reinterpret_cast<Function>(address.load(std::memory_order_acquire));
  }
};

// The library whose calls a hook intercepts.
enum class HookedLibrary {
  kExtension,  // torch_xla's extension module
  kTorch,      // libtorch_cpu, which calls these functions of its own through slots
};

struct Hook {
  const char* name;
  HookedLibrary library;
  std::vector<const char*> symbols;  // mangled; versions of torch differ, and the first that libtorch exports is taken
  void* replacement;
  std::atomic<void*>* original;
  const char* purpose;
};

}  // namespace torch_xla_donate
