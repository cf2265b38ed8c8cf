// Notices the first symbolic size.
#include "features/symbolic_sizes.h"

#include <atomic>

#include "host/graphs.h"
#include "host/symbols.h"

namespace torch_xla_donate {

namespace {

Original constructor;
std::atomic<bool> made{false};

// Torch copies a SymInt through the same constructor, and a tracer makes other SymInts.
void Constructor(c10::SymInt* self, c10::SymNode& size) {
  if (size && abi::IsSymbolicSize(*size)) {
    made.store(true, std::memory_order_relaxed);
  }
  constructor.As<abi::SymIntConstructorFn>()(self, size);
}

}  // namespace

Hook SymbolicSizeHook() {
  return Row("SymInt::SymInt", {abi::kSymIntConstructor}, &Constructor, constructor,
             "notices a size that only the device knows");
}

bool HasSymbolicSizes() noexcept { return made.load(std::memory_order_relaxed); }

}  // namespace torch_xla_donate
