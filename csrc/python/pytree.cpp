// Flattens without torch's pytree, which takes longer than a small step.
#include "python/pytree.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "host/tensors.h"

namespace torch_xla_donate {

namespace {

// A tree that is deeper, or contains itself, goes to torch's pytree, which raises RecursionError if it cannot walk it.
constexpr int kMaxDepth = 100;

// Whether no other key equals this one, in a table of hashes.
bool IsUnique(PyObject* key) {
  if (PyTuple_CheckExact(key)) {
    PyObject** items = PySequence_Fast_ITEMS(key);
    return std::all_of(items, items + PyTuple_GET_SIZE(key), IsUnique);
  }
  return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || key == Py_None ||
         Py_TYPE(key)->tp_richcompare == PyBaseObject_Type.tp_richcompare ||  // which compares by identity
         THPVariable_Check(key);                                              // which has its id as its hash
}

// NOLINTBEGIN(misc-no-recursion): at most kMaxDepth containers deep
struct Walk {
  py::handle exact;  // as for Flatten(); may be null
  py::list leaves, tokens;

  // Appends the leaves of a builtin container; false if the tree has anything else. The tokens identify the structure:
  // types, keys and sizes in preorder.
  bool Into(PyObject* tree, int depth) {
    if (THPVariable_Check(tree) || tree == Py_None || PyFloat_CheckExact(tree) || PyLong_CheckExact(tree) ||
        PyUnicode_CheckExact(tree) || PyBool_Check(tree)) {
      leaves.append(py::handle(tree));
      tokens.append(py::none());
      return true;
    }
    const bool is_dict = PyDict_CheckExact(tree);
    if (depth == kMaxDepth || !(is_dict || PyList_CheckExact(tree) || PyTuple_CheckExact(tree))) {
      return false;
    }
    // An allocation may collect garbage, and `exact` may run code of the keys. Either may change the containers.
    const auto held = py::reinterpret_borrow<py::object>(tree);
    tokens.append(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(tree))));
    return is_dict ? IntoDict(tree, depth) : IntoSequence(tree, depth);
  }

  bool IntoDict(PyObject* tree, int depth) {
    const py::tuple keys(py::reinterpret_steal<py::list>(PyDict_Keys(tree)));
    PyObject** first = PySequence_Fast_ITEMS(keys.ptr());
    tokens.append(!exact || std::all_of(first, first + keys.size(), IsUnique) ? py::object(keys) : exact(keys));
    PyObject *key = nullptr, *value = nullptr;
    std::size_t count = 0;
    for (py::ssize_t position = 0; PyDict_Next(tree, &position, &key, &value) != 0; ++count) {
      if (!Into(value, depth + 1)) {
        return false;
      }
    }
    return count == keys.size();
  }

  bool IntoSequence(PyObject* tree, int depth) {
    const py::ssize_t count = PySequence_Fast_GET_SIZE(tree);
    tokens.append(count);
    for (py::ssize_t i = 0; i < count; ++i) {
      if (PySequence_Fast_GET_SIZE(tree) != count) {
        return false;
      }
      PyObject** items = PySequence_Fast_ITEMS(tree);
      // Far enough ahead for a long list of tensors, none of which is in the cache after a step.
      if (i + 16 < count) {
        __builtin_prefetch(items[i + 16]);
      }
      if (!Into(items[i], depth + 1)) {
        return false;
      }
    }
    return true;
  }
};

// The inverse. Reads tokens from `token` on, and leaves from `leaf` on.
py::object UnflattenFrom(const py::list& leaves, const py::tuple& tokens, py::ssize_t& leaf, py::ssize_t& token) {
  const py::handle type = tokens[static_cast<std::size_t>(token++)];
  if (type.is_none()) {
    return leaves[static_cast<std::size_t>(leaf++)];
  }
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyDict_Type)) {
    py::dict result;
    for (py::handle key : py::tuple(tokens[static_cast<std::size_t>(token++)])) {
      result[key] = UnflattenFrom(leaves, tokens, leaf, token);
    }
    return result;
  }
  const py::ssize_t count = tokens[static_cast<std::size_t>(token++)].cast<py::ssize_t>();
  py::list result(static_cast<std::size_t>(count));
  for (py::ssize_t i = 0; i < count; ++i) {
    PyList_SET_ITEM(result.ptr(), i, UnflattenFrom(leaves, tokens, leaf, token).release().ptr());
  }
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyTuple_Type)) {
    return py::tuple(result);
  }
  return result;
}
// NOLINTEND(misc-no-recursion)

void AddDevice(const at::Tensor& tensor, std::vector<int>& devices) {
  const at::Device device = tensor.device();
  if (device.is_xla() && device.has_index() &&
      std::find(devices.begin(), devices.end(), device.index()) == devices.end()) {
    devices.push_back(device.index());
  }
}

}  // namespace

py::object Flatten(py::handle tree, const py::object& exact) {
  Walk walk;
  walk.exact = exact.is_none() ? nullptr : exact.ptr();
  if (!walk.Into(tree.ptr(), 0)) {
    return py::none();
  }
  return py::make_tuple(walk.leaves, py::tuple(walk.tokens));
}

py::object Unflatten(const py::list& leaves, const py::tuple& tokens) {
  py::ssize_t leaf = 0, token = 0;
  return UnflattenFrom(leaves, tokens, leaf, token);
}

Signature SignatureOf(const py::list& leaves) {
  Signature signature;
  std::string key;
  key.reserve(leaves.size() * 6 * sizeof(std::int64_t));
  std::vector<const at::Tensor*> tensors;
  tensors.reserve(leaves.size());
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (PyObject* item = PyList_GET_ITEM(leaves.ptr(), static_cast<py::ssize_t>(i)); THPVariable_Check(item)) {
      tensors.push_back(&THPVariable_Unpack(item));
      __builtin_prefetch(tensors.back()->unsafeGetTensorImpl());
    }
  }
  abi::Prefetch(tensors);
  ska::flat_hash_map<const lazy::BackendData*, std::size_t> first;
  first.reserve(leaves.size());
  const auto put = [&key](std::int64_t value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(leaves.ptr(), static_cast<py::ssize_t>(i));
    if (!THPVariable_Check(item)) {
      put(-1);
      signature.others.append(py::handle(item));
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    AddDevice(tensor, signature.devices);
    const abi::Resolution resolved = abi::Resolve(tensor);
    if (resolved.state == abi::TensorState::kDynamic) {
      signature.dynamic = true;
      continue;
    }
    put(tensor.dim());
    for (std::int64_t size : tensor.sizes()) {
      put(size);
    }
    put(static_cast<std::int64_t>(tensor.scalar_type()) * 4 + (tensor.requires_grad() ? 1 : 0) +
        (resolved.state == abi::TensorState::kNotXla ? 2 : 0));
    put(tensor.device().has_index() ? tensor.device().index() : -1);
    if (resolved.buffer == nullptr) {
      signature.pending = signature.pending || resolved.state != abi::TensorState::kNotXla;
      put(-1);
    } else {
      put(static_cast<std::int64_t>(first.emplace(resolved.buffer.get(), i).first->second));
      put(abi::ElementTypeOf(*resolved.buffer));
    }
  }
  signature.key = py::bytes(key);
  return signature;
}

std::vector<int> DevicesOf(const py::list& leaves) {
  std::vector<int> devices;
  for (py::handle leaf : leaves) {
    if (THPVariable_Check(leaf.ptr())) {
      AddDevice(THPVariable_Unpack(leaf.ptr()), devices);
    }
  }
  return devices;
}

}  // namespace torch_xla_donate
