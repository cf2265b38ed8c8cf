// Intercepts each operation that clones the tensor it overwrites, and the call that reports a replacement to torch_xla.
#include "features/whole_overwrites.h"

#include <ATen/Operators.h>
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "features/use_guard.h"
#include "host/tensors.h"
#include "registry/watch.h"

namespace torch_xla_donate {

namespace {

thread_local bool is_replacing = false;

at::Tensor EmptyLike(const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }

// Whether a tensor of torch_xla holds a consumed buffer.
bool IsToReplace(const at::Tensor& tensor) {
  const lazy::BackendDataPtr buffer = tensor.defined() && tensor.is_xla() ? abi::Resolve(tensor).buffer : nullptr;
  return buffer != nullptr && IsGone(buffer.get());
}

// The result of zero takes only shape, dtype and device from its argument.
struct Zero {
  static inline Original original;

  static at::Tensor Call(const at::Tensor& tensor) {
    return original.As<decltype(&Call)>()(Watches(kRegistry) && IsToReplace(tensor) ? EmptyLike(tensor) : tensor);
  }
};

struct ForeachZero {
  static inline Original original;

  static std::vector<at::Tensor> Call(at::TensorList tensors) {
    const auto call = original.As<decltype(&Call)>();
    if (!Watches(kRegistry) || std::none_of(tensors.begin(), tensors.end(), IsToReplace)) {
      return call(tensors);
    }
    std::vector<at::Tensor> inputs;
    inputs.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      inputs.push_back(IsToReplace(tensor) ? EmptyLike(tensor) : tensor);
    }
    return call(inputs);
  }
};

struct Replacement {
  static inline Original original;

  static void Call(const at::Tensor& before, const at::Tensor& after) {
    const auto call = original.As<decltype(&Call)>();
    if (!Watches(kRegistry)) {
      call(before, after);
      return;
    }
    const bool outer = std::exchange(is_replacing, true);
    const auto leave = c10::make_scope_exit([outer] { is_replacing = outer; });
    call(before, after);
  }
};

template <typename Hooked, typename Function>
Hook OverwriteRow(const char* name, Function function, const char* purpose) {
  Dl_info found{};
  if (dladdr(reinterpret_cast<void*>(function), &found) == 0 || found.dli_sname == nullptr) {
    throw std::runtime_error("libtorch does not export what functionalization calls for an update in place");
  }
  return Row(name, {found.dli_sname}, &Hooked::Call, Hooked::original, purpose, HookedLibrary::kTorch);
}

}  // namespace

std::vector<Hook> OverwriteHooks() {
  namespace ops = at::_ops;
  const char* const overwrites = "full overwrite of a donated tensor; does not count as a use";
  return {
      OverwriteRow<Zero>("_ops::zero::call", &ops::zero::call, overwrites),
      OverwriteRow<ForeachZero>("_ops::_foreach_zero::call", &ops::_foreach_zero::call, overwrites),
      OverwriteRow<Replacement>("_ops::_propagate_xla_data::call", &ops::_propagate_xla_data::call,
                                "torch_xla asks what an update replaces: no read"),
  };
}

bool IsReplacing() { return is_replacing; }

}  // namespace torch_xla_donate
