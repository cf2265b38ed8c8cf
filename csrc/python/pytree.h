// Trees of builtin containers: leaves, structure, and the key of a compiled graph.
//
// The caller holds the GIL.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "host/address_numbers.h"
#include "host/tensors.h"

namespace torch_xla_donate {

namespace py = pybind11;

// Leaves and tokens of a tree; None if anything in it is not a builtin container or leaf, or if it is nested deeply.
// exact: makes the token of the keys of a dict, if other keys may equal them; None to put the keys themselves.
py::object Flatten(py::handle tree, const py::object& exact);
// How many leaves a tree with these tokens of Flatten() has; 0 for tokens that are not Flatten()'s.
std::size_t LeavesOf(py::handle tokens);
// Sets the next leaves, from `next` on, of a tree that has the structure of these tokens. False, with some leaves set,
// if it has another one, or if no such comparison is possible without code of the program. Runs no such code.
bool FlattenLike(py::handle tree, py::handle tokens, const py::list& leaves, py::ssize_t& next);
// The inverse of Flatten() without `exact`, with other leaves.
py::object Unflatten(const py::list& leaves, const py::tuple& tokens);

// Whether these are one object, or ints or texts that are equal. Runs no code of the program. 1 and True differ.
bool IsSame(PyObject* one, PyObject* other);

// Prefetches the next block of tensors among a call's leaves. Call it for each leaf, in order: after a step the memory
// of a thousand tensors is in no cache, and the misses of a block do not wait for each other.
void PrefetchLeaves(PyObject** leaves, std::size_t index, std::size_t count);

// Reads what a compiled graph depends on: sizes, dtype, device, requires_grad and gradient hooks of tensors, which
// share a buffer, and which are of a class of their own.
class TensorReader {
 public:
  // most: how many tensors will be read.
  explicit TensorReader(std::size_t most) : buffers_(most) {}
  void Read(PyObject* object);

  // Of the tensor read last. No facts begin like others; the first is not negative.
  c10::SmallVector<std::int64_t, 16> facts;
  PyTypeObject* kind = nullptr;          // its class, unless that is torch's Tensor or Parameter
  c10::SmallVector<PyObject*, 2> hooks;  // its gradient hooks; the facts say how many
  const at::Tensor* tensor = nullptr;
  const std::shared_ptr<abi::TensorData>* data = nullptr;
  const lazy::BackendDataPtr* buffer = nullptr;  // null if it holds none
  at::IntArrayRef sizes;

  // Of any tensor read so far.
  bool pending = false;  // it has no value yet
  bool dynamic = false;  // only the device knows its size; it has no facts
  bool distinct = true;  // each is an XLA tensor and has a buffer of its own

 private:
  AddressNumbers buffers_;
  std::uint32_t count_ = 0;  // of the tensors with a buffer
  abi::Resolution resolved_;
};

// The inputs of a compiled graph. The key has the facts of each tensor in turn, and kNoTensor for each other leaf;
// `others` has the leaves that are not tensors, and the classes (`kind`) of those that have one, in their order.
constexpr std::int64_t kNoTensor = -1;
struct Signature {
  py::bytes key;
  std::vector<int> devices;         // as DevicesOf()
  bool pending, dynamic, distinct;  // as TensorReader's
  py::list others, hooks;
};
Signature SignatureOf(const py::list& leaves);

// The indices of the XLA devices of the tensors among the leaves, each once.
std::vector<int> DevicesOf(const py::list& leaves);

}  // namespace torch_xla_donate
