// Finds the functions of the table, and patches the slots that call them.
#include "step/hooks.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <utility>

#include "elf/patch.h"
#include "host/never_destroyed.h"

namespace torch_xla_donate {

namespace {

struct Installation {
  std::mutex mutex;
  std::vector<GotPatch> patches;  // in the order of the table
  bool is_whole = false;          // none of them has been undone
};
Installation& TheInstallation() { return NeverDestroyed<Installation>(); }

// A hook's function in libtorch. The dynamic linker must have put this address into the slots, also those of libtorch.
struct Import {
  const char* symbol;
  void* address;
};
Import Find(const Hook& hook) {
  // Python loads extension modules and their libraries with RTLD_LOCAL, so RTLD_DEFAULT may not find the symbol.
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  Import found{hook.symbols.front(), nullptr};
  for (const char* symbol : hook.symbols) {
    void* address = dlsym(RTLD_DEFAULT, symbol);
    if (address == nullptr && torch != nullptr) {
      address = dlsym(torch, symbol);
    }
    if (address != nullptr) {
      found = {symbol, address};
      break;
    }
  }
  if (torch != nullptr) {
    dlclose(torch);
  }
  return found;
}

// The file of the library that contains the function.
std::string FileOf(const void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) {
    throw std::runtime_error("the dynamic linker does not know the file of libtorch_cpu");
  }
  return info.dli_fname;
}

}  // namespace

void InstallHooks(const std::string& library_path) {
  Installation& installation = TheInstallation();
  std::lock_guard<std::mutex> lock(installation.mutex);
  if (installation.is_whole) {
    return;
  }
  if (!installation.patches.empty()) {
    throw std::runtime_error("another tool still holds slots of hooks that were removed");
  }
  std::vector<PatchSpec> in_extension, in_torch;  // in the order of the table
  for (const Hook& hook : HookTable()) {
    const Import import = Find(hook);
    if (import.address == nullptr) {
      throw std::runtime_error(std::string("libtorch does not export ") + import.symbol);
    }
    (hook.library == HookedLibrary::kTorch ? in_torch : in_extension)
        .push_back({import.symbol, import.address, hook.replacement, &hook.original->address});
  }
  std::vector<GotPatch> patches = InstallAll(ElfImage::Find(library_path), in_extension);
  for (GotPatch& patch : InstallAll(ElfImage::Find(FileOf(in_torch.front().expected)), in_torch)) {
    patches.push_back(std::move(patch));
  }
  installation.patches = std::move(patches);
  installation.is_whole = true;
}

std::size_t UninstallHooks() {
  Installation& installation = TheInstallation();
  std::lock_guard<std::mutex> lock(installation.mutex);
  installation.is_whole = false;
  std::size_t left = 0;
  for (auto patch = installation.patches.rbegin(); patch != installation.patches.rend(); ++patch) {
    left += patch->Undo();
  }
  if (left == 0) {
    installation.patches.clear();
  }
  return left;
}

bool HooksInstalled() {
  Installation& installation = TheInstallation();
  std::lock_guard<std::mutex> lock(installation.mutex);
  return installation.is_whole;
}

std::vector<HookInfo> Hooks() {
  Installation& installation = TheInstallation();
  std::lock_guard<std::mutex> lock(installation.mutex);
  std::vector<HookInfo> result;
  for (std::size_t i = 0; i < HookTable().size(); ++i) {
    const Hook& hook = HookTable()[i];
    HookInfo info{hook.name, hook.library == HookedLibrary::kTorch ? "libtorch_cpu" : "_XLAC", Find(hook).symbol,
                  hook.purpose};
    if (i < installation.patches.size()) {
      info.slots = installation.patches[i].SlotCount();
      info.in_place = installation.patches[i].InPlace();
    }
    result.push_back(std::move(info));
  }
  return result;
}

}  // namespace torch_xla_donate
