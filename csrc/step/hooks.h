// The one table of hooks: which calls of torch_xla and libtorch pass through this package, and how they get there.
//
// Ownership: the patches belong to this file; UninstallHooks() or the end of the process undoes them.
// Threads: all functions may be called from any thread.
// Errors: InstallHooks() throws std::runtime_error and leaves nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

namespace torch_xla_donate {

// The function whose place a hook has taken. Published before the first slot is patched, and never reset: a thread may
// be inside the hook while it is undone.
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

// A row of the table.
struct Hook {
  const char* name;  // "LazyGraphExecutor::RunPostOrder"
  HookedLibrary library;
  std::vector<const char*> symbols;  // mangled; versions of torch differ, and the first that libtorch exports is taken
  void* replacement;
  Original* original;
  const char* purpose;
};

struct HookInfo {
  std::string name;
  std::string library;  // "_XLAC" or "libtorch_cpu"
  std::string symbol;
  std::string purpose;
  std::size_t slots = 0;  // 0 while not installed
  std::size_t in_place = 0;
};

// Patches the library whose file is given (torch_xla's extension module), and libtorch_cpu. A second call does nothing.
void InstallHooks(const std::string& library_path);
// Puts both back. Marks stay, but no step sees them. Returns the number of slots that a stranger holds.
std::size_t UninstallHooks();
bool HooksInstalled();
// The table, installed or not.
std::vector<HookInfo> Hooks();

}  // namespace torch_xla_donate
