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
#include "step/watch.h"

namespace torch_xla_donate {

namespace {

thread_local bool is_replacing = false;

bool HoldsConsumed(const at::Tensor& tensor) {
  const lazy::BackendDataPtr buffer = abi::Resolve(tensor).buffer;
  return buffer != nullptr && IsGone(buffer.get());
}

template <typename Op, typename Schema = typename Op::schema>
struct Overwrite;

at::Tensor EmptyLike(const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }

bool IsToReplace(const at::Tensor& tensor) { return tensor.defined() && tensor.is_xla() && HoldsConsumed(tensor); }

// The result takes only shape, dtype and device from the first argument.
template <typename Op, typename... Rest>
struct Overwrite<Op, at::Tensor(const at::Tensor&, Rest...)> {
  using Function = at::Tensor (*)(const at::Tensor&, Rest...);
  static inline Original original;

  static at::Tensor Call(const at::Tensor& self, Rest... rest) {
    const auto call = original.As<Function>();
    if (Watches(kRegistry) && IsToReplace(self)) {
      return call(EmptyLike(self), std::forward<Rest>(rest)...);
    }
    return call(self, std::forward<Rest>(rest)...);
  }
};

// The same for a list of tensors.
template <typename Op>
struct Overwrite<Op, std::vector<at::Tensor>(at::TensorList)> {
  using Function = std::vector<at::Tensor> (*)(at::TensorList);
  static inline Original original;

  static std::vector<at::Tensor> Call(at::TensorList tensors) {
    const auto call = original.As<Function>();
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
  using Function = void (*)(const at::Tensor&, const at::Tensor&);
  static inline Original original;

  static void Call(const at::Tensor& before, const at::Tensor& after) {
    const auto call = original.As<Function>();
    if (!Watches(kRegistry)) {
      call(before, after);
      return;
    }
    const bool outer = std::exchange(is_replacing, true);
    const auto leave = c10::make_scope_exit([outer] { is_replacing = outer; });
    call(before, after);
  }
};

template <typename Function>
Hook Row(const char* name, Function function, void* replacement, Original& original, const char* purpose) {
  Dl_info found{};
  if (dladdr(reinterpret_cast<void*>(function), &found) == 0 || found.dli_sname == nullptr) {
    throw std::runtime_error("libtorch does not export what functionalization calls for an update in place");
  }
  return {name, HookedLibrary::kTorch, {found.dli_sname}, replacement, &original, purpose};
}

template <typename Op>
Hook RowOf(const char* name) {
  return Row(name, &Op::call, reinterpret_cast<void*>(&Overwrite<Op>::Call), Overwrite<Op>::original,
             "overwrites a donated tensor as a whole: no use");
}

}  // namespace

std::vector<Hook> OverwriteHooks() {
  namespace ops = at::_ops;
  return {
      RowOf<ops::zero>("_ops::zero::call"),
      RowOf<ops::_foreach_zero>("_ops::_foreach_zero::call"),
      RowOf<ops::uniform>("_ops::uniform::call"),
      RowOf<ops::normal_functional>("_ops::normal_functional::call"),
      RowOf<ops::bernoulli_Tensor>("_ops::bernoulli_Tensor::call"),
      RowOf<ops::bernoulli_p>("_ops::bernoulli_p::call"),
      RowOf<ops::exponential>("_ops::exponential::call"),
      RowOf<ops::geometric>("_ops::geometric::call"),
      RowOf<ops::log_normal>("_ops::log_normal::call"),
      RowOf<ops::cauchy>("_ops::cauchy::call"),
      RowOf<ops::random>("_ops::random::call"),
      RowOf<ops::random_from>("_ops::random_from::call"),
      RowOf<ops::random_to>("_ops::random_to::call"),
      Row("_ops::_propagate_xla_data::call", &ops::_propagate_xla_data::call,
          reinterpret_cast<void*>(&Replacement::Call), Replacement::original,
          "torch_xla asks what an update replaces: no read"),
  };
}

bool IsReplacing() { return is_replacing; }

}  // namespace torch_xla_donate
