// One intercept for each operation that clones what it overwrites, and one for what tells torch_xla of a replacement.
#include "features/whole_overwrites.h"

#include <ATen/Operators.h>
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "host/torch_xla_abi.h"
#include "registry/registry.h"

namespace torch_xla_donate {

namespace {

thread_local bool is_replacing = false;

bool IsGone(const at::Tensor& tensor) {
  const lazy::BackendDataPtr buffer = abi::Resolve(tensor).buffer;
  const DonationRegistry& registry = DonationRegistry::Get();
  return buffer != nullptr && (registry.IsTracked(buffer.get()) ||
                               (registry.HasSpared() && registry.FindSpared(buffer.get()).first != nullptr));
}

template <typename Op, typename Schema = typename Op::schema>
struct Overwrite;

at::Tensor EmptyLike(const at::Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); }

bool IsToReplace(const at::Tensor& tensor) { return tensor.defined() && tensor.is_xla() && IsGone(tensor); }

// The result has the shape, dtype and device of the first argument, and depends on nothing else of it.
template <typename Op, typename... Rest>
struct Overwrite<Op, at::Tensor(const at::Tensor&, Rest...)> {
  using Function = at::Tensor (*)(const at::Tensor&, Rest...);
  static inline std::atomic<void*> original{nullptr};

  static at::Tensor Call(const at::Tensor& self, Rest... rest) {
    const auto call = reinterpret_cast<Function>(original.load(std::memory_order_acquire));
    if (DonationRegistry::Armed() && IsToReplace(self)) {
      return call(EmptyLike(self), std::forward<Rest>(rest)...);
    }
    return call(self, std::forward<Rest>(rest)...);
  }
};

// The same for a list of tensors.
template <typename Op>
struct Overwrite<Op, std::vector<at::Tensor>(at::TensorList)> {
  using Function = std::vector<at::Tensor> (*)(at::TensorList);
  static inline std::atomic<void*> original{nullptr};

  static std::vector<at::Tensor> Call(at::TensorList tensors) {
    const auto call = reinterpret_cast<Function>(original.load(std::memory_order_acquire));
    if (!DonationRegistry::Armed() || std::none_of(tensors.begin(), tensors.end(), IsToReplace)) {
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
  static inline std::atomic<void*> original{nullptr};

  static void Call(const at::Tensor& before, const at::Tensor& after) {
    const auto call = reinterpret_cast<Function>(original.load(std::memory_order_acquire));
    if (!DonationRegistry::Armed()) {
      call(before, after);
      return;
    }
    const bool outer = std::exchange(is_replacing, true);
    const auto leave = c10::make_scope_exit([outer] { is_replacing = outer; });
    call(before, after);
  }
};

template <typename Function>
PatchSpec SpecOf(Function function, void* replacement, std::atomic<void*>* original) {
  Dl_info found{};
  if (dladdr(reinterpret_cast<void*>(function), &found) == 0 || found.dli_sname == nullptr) {
    throw std::runtime_error("libtorch does not export what functionalization calls for an update in place");
  }
  return {found.dli_sname, reinterpret_cast<void*>(function), replacement, original};
}

template <typename... Ops>
std::vector<PatchSpec> SpecsOf() {
  return {SpecOf(&Ops::call, reinterpret_cast<void*>(&Overwrite<Ops>::Call), &Overwrite<Ops>::original)...};
}

}  // namespace

std::vector<GotPatch> InstallOverwriteHooks() {
  using at::_ops::_propagate_xla_data;
  std::vector<PatchSpec> specs =
      SpecsOf<at::_ops::zero, at::_ops::_foreach_zero, at::_ops::uniform, at::_ops::normal_functional,
              at::_ops::bernoulli_Tensor, at::_ops::bernoulli_p, at::_ops::exponential, at::_ops::geometric,
              at::_ops::log_normal, at::_ops::cauchy, at::_ops::random, at::_ops::random_from, at::_ops::random_to>();
  specs.push_back(
      SpecOf(&_propagate_xla_data::call, reinterpret_cast<void*>(&Replacement::Call), &Replacement::original));
  Dl_info library{};
  dladdr(specs.back().expected, &library);
  return InstallAll(ElfImage::Find(library.dli_fname), specs);
}

bool IsReplacing() { return is_replacing; }

}  // namespace torch_xla_donate
