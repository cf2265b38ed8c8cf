// Flattens without torch's pytree, which takes longer than a small step.
#include "python/pytree.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <string>
#include <vector>

#include "host/tensors.h"

namespace torch_xla_donate {

namespace {

// Appends the leaves of a builtin container; false if the tree has anything else. The tokens identify the structure:
// types, keys and sizes in preorder.
bool FlattenInto(PyObject* tree, py::list& leaves, py::list& tokens) {
  if (THPVariable_Check(tree) || tree == Py_None || PyFloat_CheckExact(tree) || PyLong_CheckExact(tree)) {
    leaves.append(py::handle(tree));
    tokens.append(py::none());
    return true;
  }
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tree));
  if (PyDict_CheckExact(tree)) {
    tokens.append(py::handle(type));
    tokens.append(py::tuple(py::reinterpret_steal<py::list>(PyDict_Keys(tree))));
    PyObject *key = nullptr, *value = nullptr;
    for (py::ssize_t position = 0; PyDict_Next(tree, &position, &key, &value) != 0;) {
      if (!FlattenInto(value, leaves, tokens)) {
        return false;
      }
    }
    return true;
  }
  if (PyList_CheckExact(tree) || PyTuple_CheckExact(tree)) {
    const py::ssize_t count = PySequence_Fast_GET_SIZE(tree);
    tokens.append(py::handle(type));
    tokens.append(count);
    PyObject** items = PySequence_Fast_ITEMS(tree);
    for (py::ssize_t i = 0; i < count; ++i) {
      // Far enough ahead for a long list of tensors, none of which is in the cache after a step.
      if (i + 16 < count) {
        __builtin_prefetch(items[i + 16]);
      }
      if (!FlattenInto(items[i], leaves, tokens)) {
        return false;
      }
    }
    return true;
  }
  if (PyUnicode_CheckExact(tree) || PyBool_Check(tree)) {
    leaves.append(py::handle(tree));
    tokens.append(py::none());
    return true;
  }
  return false;
}

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

}  // namespace

py::object Flatten(py::handle tree) {
  py::list leaves, tokens;
  if (!FlattenInto(tree.ptr(), leaves, tokens)) {
    return py::none();
  }
  return py::make_tuple(leaves, py::tuple(tokens));
}

py::object Unflatten(const py::list& leaves, const py::tuple& tokens) {
  py::ssize_t leaf = 0, token = 0;
  return UnflattenFrom(leaves, tokens, leaf, token);
}

Signature SignatureOf(const py::list& leaves) {
  Signature signature;
  std::string key;
  key.reserve(leaves.size() * 5 * sizeof(std::int64_t));
  std::vector<const at::Tensor*> tensors;
  tensors.reserve(leaves.size());
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (PyObject* item = PyList_GET_ITEM(leaves.ptr(), static_cast<py::ssize_t>(i)); THPVariable_Check(item)) {
      tensors.push_back(&THPVariable_Unpack(item));
      __builtin_prefetch(tensors.back()->unsafeGetTensorImpl());
    }
  }
  abi::Prefetch(tensors);
  ska::flat_hash_map<const torch::lazy::BackendData*, std::size_t> first;
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
    }
  }
  signature.key = py::bytes(key);
  return signature;
}

}  // namespace torch_xla_donate
