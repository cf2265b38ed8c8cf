// Hooks on calls of torch_xla and libtorch, and their installation.
//
// Ownership: the patches belong to this file; UninstallHooks() or the end of the process undoes them.
// Threads: any thread may call all functions.
// Errors: InstallHooks() throws std::runtime_error and leaves nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace torch_xla_donate {

// The function that a hook replaces. Set before the first slot is patched and never reset, because a thread may still
// run the hook when it is removed.
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
  kTorch,      // libtorch_cpu, which calls some of its functions through slots
};

struct Hook {
  const char* name;  // "LazyGraphExecutor::RunPostOrder"
  HookedLibrary library;
  std::vector<const char*> symbols;  // mangled; versions differ, and the first that libtorch exports is used
  void* replacement;
  Original* original;
  const char* purpose;
};

// A row of the table. `replacement` has the type of the function that it replaces.
template <typename Function>
Hook Row(const char* name, std::vector<const char*> symbols, Function* replacement, Original& original,
         const char* purpose, HookedLibrary library = HookedLibrary::kExtension) {
  return {name, library, std::move(symbols), reinterpret_cast<void*>(replacement), &original, purpose};
}

// All hooks; see features/intercepts.cpp.
const std::vector<Hook>& HookTable();

struct HookInfo {
  std::string name;
  std::string library;  // "_XLAC" or "libtorch_cpu"
  std::string symbol;
  std::string purpose;
  std::size_t slots = 0;  // 0 while not installed
  std::size_t in_place = 0;
};

// Patches torch_xla's extension module, whose file is given, and libtorch_cpu. Does nothing if the hooks are installed.
void InstallHooks(const std::string& library_path);
// Removes the hooks. Marks stay, but no step sees them. Returns the number of slots that hold another patch.
std::size_t UninstallHooks();
bool HooksInstalled();
// The table, whether the hooks are installed or not.
std::vector<HookInfo> Hooks();

}  // namespace torch_xla_donate
