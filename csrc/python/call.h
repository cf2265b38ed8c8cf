// The marks of one call, as Python holds them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "registry/steps.h"

namespace torch_xla_donate {

// Why a call has marked nothing.
struct LeafRefusal {
  std::size_t leaf;                 // the first leaf that cannot be marked
  std::string obstacle;             // as `state` names it, "not_tensor" or "also_kept"
  std::optional<std::size_t> kept;  // for "also_kept": the position of the other leaf
};

// A call's marks. The destructor cancels a scope's pending marks, for example after an interrupt in its caller.
struct Call {
  std::shared_ptr<CallSite> site;
  std::vector<std::uint32_t> constants;  // positions of leaves whose buffers torch_xla shares between tensors
  std::shared_ptr<CallDonors> donors;    // of all leaves, also those marked earlier by another call
  bool is_scope = false;                 // the marks end with this object at the latest

  explicit Call(std::shared_ptr<CallSite> of = nullptr) : site(std::move(of)) {}
  Call(Call&&) = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  Call& operator=(Call&&) = default;  // of one without marks
  ~Call() {
    if (site != nullptr && is_scope) {
      Steps::Get().CancelCall(site.get());
    }
  }
};

// The Python object of a call that its function fills and returns. Made after the marks it would need memory, and the
// marks would stay if there is none.
template <typename T>
struct PythonCall {
  pybind11::object object = pybind11::cast(T());
  T& call = object.cast<T&>();
};

// names: a Python object that names the leaves.
std::shared_ptr<CallSite> MakeCallSite(const std::string& where, int strict, pybind11::object names,
                                       bool for_compiled_run = false);

// A donated leaf of a compiled function's call. It has no obstacle.
struct ArgumentToMark {
  std::shared_ptr<abi::TensorData> tensor;
  lazy::BackendDataPtr buffer;
  at::IntArrayRef sizes;
  std::uint32_t index;
  bool has_aliases;  // as abi::HasAliases()
};
// Marks the donated leaves of a call as a scope. `items` has the tensor of each leaf at its index. Throws if one of
// them has been consumed.
Call MarkForCall(const std::vector<ArgumentToMark>& leaves, PyObject** items, std::shared_ptr<CallSite> site);

// Positions of a call's leaves whose buffers may have another holder or a pending reader. May have too many, never too
// few. Releases the GIL to wait for a run that is starting, which holds its outputs: in a loop they are the donors of
// the next call, whose run would wait for it anyway.
std::vector<std::uint32_t> PerhapsShared(const CallSite& call);

}  // namespace torch_xla_donate
