// Replacements for the callee's functions, and the first steps of every test of a patch.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "elf/patch.h"
#include "victims.h"

using namespace torch_xla_donate;

using Function = int (*)(const void*, int, int);

// A replacement adds a mark to the result of the original.
template <int mark>
struct Hook {
  static inline std::atomic<void*> original{nullptr};
  static int Run(const void* self, int a, int b) {
    return mark + reinterpret_cast<Function>(original.load())(self, a, b);
  }
  static PatchSpec Spec(const char* symbol) {
    return {symbol, CalleeFunction(symbol), reinterpret_cast<void*>(&Run), &original};
  }
};
using First = Hook<1000>;
using Second = Hook<20000>;

inline GotPatch Install(const ElfImage& image, const PatchSpec& spec) {
  return GotPatch(image, spec, SlotsOf(image, spec.symbol));
}

inline std::vector<void*> Contents(const std::vector<RelocationSlot>& slots) {
  std::vector<void*> values;
  for (const RelocationSlot& slot : slots) values.push_back(*slot.address);
  return values;
}
