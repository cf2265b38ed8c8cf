// Compares the arguments of a call with those of an earlier one, and marks the donated ones.
#include "python/replay.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <utility>

#include "features/compiled_run.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "host/views.h"
#include "python/bind.h"
#include "python/deferred_decref.h"

namespace torch_xla_donate {

namespace {

// Leaves that are prefetched together: more would not stay in the processor's first cache until they are compared.
constexpr std::size_t kBlock = 32;

bool IsPlainValue(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) || PyUnicode_CheckExact(object);
}

// For values of IsPlainValue(), whose comparison runs no code of the program.
bool IsSame(PyObject* one, PyObject* other) {
  return one == other || (Py_TYPE(one) == Py_TYPE(other) && (PyLong_CheckExact(one) || PyUnicode_CheckExact(one)) &&
                          PyObject_RichCompareBool(one, other, Py_EQ) == 1);
}

}  // namespace

Replay::Replay(const py::list& structures, const py::list& leaves, std::vector<DonatedLeaf> donated, std::string graph,
               py::object names)
    : donated_(std::move(donated)), graph_(std::move(graph)), names_(std::move(names)) {
  for (const py::handle structure : structures) {
    possible_ = possible_ && ReadTokens(structure);
  }
  std::size_t places = 0;
  for (const Token& token : tokens_) {
    places += token.type == nullptr ? 1 : 0;
  }
  possible_ = possible_ && places == leaves.size() && !donated_.empty();
  std::size_t tensors = 0;
  ska::flat_hash_set<const lazy::BackendData*> buffers;
  for (const py::handle item : leaves) {
    Leaf leaf{Leaf::Kind::kValue, {}, {}};
    if (THPVariable_Check(item.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
      const abi::Resolution resolved = abi::Resolve(tensor);
      if (resolved.buffer == nullptr || resolved.state == abi::TensorState::kDynamic) {
        possible_ = false;
        return;
      }
      ++tensors;
      buffers.insert(resolved.buffer.get());
      leaf.kind = Leaf::Kind::kTensor;
      leaf.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
      leaf.dtype = tensor.scalar_type();
      leaf.element_type = abi::ElementTypeOf(*resolved.buffer);
      leaf.device = tensor.device().index();
      leaf.requires_grad = tensor.requires_grad();
    } else if (PyFloat_CheckExact(item.ptr())) {
      leaf.kind = Leaf::Kind::kFloat;
    } else {
      leaf.value = py::reinterpret_borrow<py::object>(item);
      possible_ = possible_ && IsPlainValue(item.ptr());
    }
    leaves_.push_back(std::move(leaf));
  }
  for (const DonatedLeaf& donor : donated_) {
    leaves_[donor.leaf].is_donated = true;
  }
  possible_ = possible_ && buffers.size() == tensors;
}

// False for the structure of a tree that is not one of builtin containers, or whose keys may be equal to others.
bool Replay::ReadTokens(py::handle structure) {
  if (!PyTuple_CheckExact(structure.ptr())) {
    return false;
  }
  const py::ssize_t size = PyTuple_GET_SIZE(structure.ptr());
  for (py::ssize_t i = 0; i < size; ++i) {
    PyObject* type = PyTuple_GET_ITEM(structure.ptr(), i);
    if (type == Py_None) {
      tokens_.push_back({nullptr, {}, 0});
      continue;
    }
    PyObject* content = ++i < size ? PyTuple_GET_ITEM(structure.ptr(), i) : Py_None;
    if (type == reinterpret_cast<PyObject*>(&PyDict_Type) && PyTuple_CheckExact(content)) {
      tokens_.push_back({&PyDict_Type, py::reinterpret_borrow<py::object>(content), 0});
    } else if ((type == reinterpret_cast<PyObject*>(&PyList_Type) ||
                type == reinterpret_cast<PyObject*>(&PyTuple_Type)) &&
               PyLong_CheckExact(content)) {
      tokens_.push_back({reinterpret_cast<PyTypeObject*>(type), {}, PyLong_AsSsize_t(content)});
    } else {
      return false;
    }
  }
  return true;
}

// NOLINTBEGIN(misc-no-recursion): as deep as the structures, which Flatten() limits
bool Replay::Collect(PyObject* tree, std::size_t& token, const py::list& leaves, std::size_t& count) const {
  const Token& expected = tokens_[token++];
  if (expected.type == nullptr) {
    PyList_SET_ITEM(leaves.ptr(), static_cast<py::ssize_t>(count++), py::handle(tree).inc_ref().ptr());
    return true;
  }
  if (Py_TYPE(tree) != expected.type) {
    return false;
  }
  if (expected.type == &PyDict_Type) {
    if (PyDict_GET_SIZE(tree) != PyTuple_GET_SIZE(expected.keys.ptr())) {
      return false;
    }
    PyObject *key = nullptr, *value = nullptr;
    for (py::ssize_t position = 0, i = 0; PyDict_Next(tree, &position, &key, &value) != 0; ++i) {
      PyObject* known = PyTuple_GET_ITEM(expected.keys.ptr(), i);
      if ((key != known && !(IsPlainValue(key) && IsSame(key, known))) || !Collect(value, token, leaves, count)) {
        return false;
      }
    }
    return true;
  }
  if (PySequence_Fast_GET_SIZE(tree) != expected.count) {
    return false;
  }
  PyObject** items = PySequence_Fast_ITEMS(tree);  // nothing here runs code that could change the list
  for (py::ssize_t i = 0; i < expected.count; ++i) {
    if (i + 16 < expected.count) {
      __builtin_prefetch(items[i + 16]);
    }
    if (!Collect(items[i], token, leaves, count)) {
      return false;
    }
  }
  return true;
}
// NOLINTEND(misc-no-recursion)

bool Replay::AreAlike(PyObject** leaves, std::vector<ArgumentToMark>& donated) const {
  AddressNumbers buffers(leaves_.size());
  std::vector<const at::Tensor*> tensors;
  tensors.reserve(kBlock);
  for (std::size_t begin = 0; begin < leaves_.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, leaves_.size());
    tensors.clear();
    for (std::size_t i = begin; i < end; ++i) {
      const Leaf& expected = leaves_[i];
      if (expected.kind == Leaf::Kind::kTensor  ? !THPVariable_Check(leaves[i])
          : expected.kind == Leaf::Kind::kFloat ? !PyFloat_CheckExact(leaves[i])
                                                : !IsSame(leaves[i], expected.value.ptr())) {
        return false;
      }
      if (expected.kind == Leaf::Kind::kTensor) {
        tensors.push_back(&THPVariable_Unpack(leaves[i]));
      }
    }
    abi::Prefetch(tensors);
    for (std::size_t i = begin; i < end; ++i) {
      if (leaves_[i].kind == Leaf::Kind::kTensor && !IsAlike(THPVariable_Unpack(leaves[i]), i, buffers, donated)) {
        return false;
      }
    }
  }
  const abi::InfosLocked infos;
  return std::none_of(donated.begin(), donated.end(), [&infos](const ArgumentToMark& leaf) {
    const auto info = infos.Of(*leaf.buffer);
    return info.has_value() && info->read_only;
  });
}

bool Replay::IsAlike(const at::Tensor& tensor, std::size_t index, AddressNumbers& buffers,
                     std::vector<ArgumentToMark>& donated) const {
  const Leaf& expected = leaves_[index];
  if (tensor.scalar_type() != expected.dtype || tensor.requires_grad() != expected.requires_grad ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || !tensor.device().is_xla() ||
      tensor.device().index() != expected.device) {
    return false;
  }
  std::optional<abi::HeldArray> held = abi::HeldBy(tensor);
  abi::Resolution other;
  if (!held.has_value()) {
    other = abi::Resolve(tensor);
    if (other.state != abi::TensorState::kMaterialized && other.state != abi::TensorState::kReadOnly) {
      return false;
    }
    held = {&other.tensor, &other.buffer, tensor.sizes()};
  }
  const lazy::BackendDataPtr& buffer = *held->buffer;
  if (held->sizes != at::IntArrayRef(expected.sizes) || abi::ElementTypeOf(*buffer) != expected.element_type ||
      buffers.Of(buffer.get()) != AddressNumbers::kUnknown) {
    return false;
  }
  buffers.Add(buffer.get());
  if (expected.is_donated) {
    donated.push_back({*held->tensor, buffer, held->sizes, static_cast<std::uint32_t>(index)});
  }
  return true;
}

py::object Replay::Begin(const py::list& arguments, const std::string& where, int strict) const {
  RunDeferredDecrefs();
  PythonCall<Begun> made;
  Begun& begun = made.call;
  begun.leaves = py::list(leaves_.size());
  std::size_t token = 0, count = 0;
  for (const py::handle argument : arguments) {
    if (!Collect(argument.ptr(), token, begun.leaves, count)) {
      return py::none();
    }
  }
  PyObject** items = PySequence_Fast_ITEMS(begun.leaves.ptr());
  std::vector<ArgumentToMark> donated;
  donated.reserve(donated_.size());
  if (!AreAlike(items, donated)) {
    return py::none();
  }
  const auto site = MakeCallSite(where, strict, names_, /*for_compiled_run=*/true);
  Call call = MarkForCall(donated, items, site);
  // As in mark_arguments: an argument that is a view of a donated one keeps its value.
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    if (leaves_[i].kind == Leaf::Kind::kTensor && abi::HasAliases(THPVariable_Unpack(items[i]))) {
      abi::KeepValue(THPVariable_Unpack(items[i]));
    }
  }
  for (ArgumentToMark& leaf : donated) {
    leaf.buffer.reset();  // the call's own pointers must not count as other holders
  }
  if (!PerhapsShared(*site).empty()) {
    return py::none();
  }
  std::vector<lazy::BackendDataPtr> buffers;
  std::vector<Steps::Offer> offers;
  buffers.reserve(donated.size());
  offers.reserve(donated.size());
  for (std::size_t i = 0; i < donated.size(); ++i) {
    buffers.push_back(abi::BufferOf(*donated[i].tensor));
    offers.push_back({nullptr, donated_[i].parameter, donated_[i].preferred_output});
  }
  begun.armed = DonateToNextRun(site.get(), buffers, std::move(offers), graph_);
  static_cast<Call&>(begun) = std::move(call);
  return std::move(made.object);
}

}  // namespace torch_xla_donate
