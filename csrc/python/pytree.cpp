// Flattens without torch's pytree, which takes longer than a small step.
#include "python/pytree.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/tensors.h"
#include "python/bind.h"

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
         IsTensor(key);                                                       // which has its id as its hash
}

// NOLINTBEGIN(misc-no-recursion): at most kMaxDepth containers deep
struct Walk {
  py::handle exact;     // as for Flatten(); may be null
  py::handle expected;  // a tuple of tokens, to compare with; null to append tokens
  py::list leaves, tokens;
  py::ssize_t compared = 0;  // of the tokens
  py::ssize_t next = 0;      // of the leaves, which are there already if `expected` is

  // Appends the leaves of a builtin container; false if the tree has anything else, or another structure than expected.
  // The tokens identify the structure: types, keys and sizes in preorder.
  bool Into(PyObject* tree, int depth) {
    if (IsTensor(tree) || tree == Py_None || PyFloat_CheckExact(tree) || PyLong_CheckExact(tree) ||
        PyUnicode_CheckExact(tree) || PyBool_Check(tree)) {
      if (!Put(py::none())) {
        return false;
      }
      if (!expected) {
        leaves.append(py::handle(tree));
        return true;
      }
      return PyList_SetItem(leaves.ptr(), next++, Py_NewRef(tree)) == 0;
    }
    const bool is_dict = PyDict_CheckExact(tree);
    if (depth == kMaxDepth || !(is_dict || PyList_CheckExact(tree) || PyTuple_CheckExact(tree))) {
      return false;
    }
    // An allocation may collect garbage, and `exact` may run code of the keys. Either may change the containers.
    const auto held = py::reinterpret_borrow<py::object>(tree);
    return Put(py::type::of(held)) && (is_dict ? IntoDict(tree, depth) : IntoSequence(tree, depth));
  }

  bool Put(const py::object& token) {
    if (!expected) {
      tokens.append(token);
      return true;
    }
    if (compared == PyTuple_GET_SIZE(expected.ptr())) {
      return false;
    }
    PyObject* known = PyTuple_GET_ITEM(expected.ptr(), compared++);
    if (!PyTuple_CheckExact(token.ptr()) || !PyTuple_CheckExact(known)) {
      return IsSame(token.ptr(), known);
    }
    PyObject **keys = PySequence_Fast_ITEMS(token.ptr()), **known_keys = PySequence_Fast_ITEMS(known);
    return std::equal(keys, keys + PyTuple_GET_SIZE(token.ptr()), known_keys, known_keys + PyTuple_GET_SIZE(known),
                      IsSame);
  }

  bool IntoDict(PyObject* tree, int depth) {
    const py::tuple keys(py::reinterpret_steal<py::list>(PyDict_Keys(tree)));
    PyObject** first = PySequence_Fast_ITEMS(keys.ptr());
    if (!Put(!exact || std::all_of(first, first + keys.size(), IsUnique) ? py::object(keys) : exact(keys))) {
      return false;
    }
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
    if (!Put(py::int_(count))) {
      return false;
    }
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

bool IsSame(PyObject* one, PyObject* other) {
  return one == other || (Py_TYPE(one) == Py_TYPE(other) && (PyLong_CheckExact(one) || PyUnicode_CheckExact(one)) &&
                          PyObject_RichCompareBool(one, other, Py_EQ) == 1);
}

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

std::size_t LeavesOf(py::handle tokens) {
  if (!PyTuple_CheckExact(tokens.ptr())) {
    return 0;
  }
  PyObject** first = PySequence_Fast_ITEMS(tokens.ptr());
  return static_cast<std::size_t>(std::count(first, first + PyTuple_GET_SIZE(tokens.ptr()), Py_None));
}

bool FlattenLike(py::handle tree, py::handle tokens, const py::list& leaves, py::ssize_t& next) {
  Walk walk;
  walk.expected = tokens;
  walk.leaves = leaves;
  walk.next = next;
  const bool is_like =
      PyTuple_CheckExact(tokens.ptr()) && walk.Into(tree.ptr(), 0) && walk.compared == PyTuple_GET_SIZE(tokens.ptr());
  next = walk.next;
  return is_like;
}

void PrefetchLeaves(PyObject** leaves, std::size_t index, std::size_t count) {
  constexpr std::size_t kBlock = 32;  // more would not stay in the processor's first cache until they are read
  if (index % kBlock != 0 || count == 1) {
    return;
  }
  PyObject** const end = leaves + std::min(count, index + kBlock);
  for (PyObject** leaf = leaves + index; leaf != end; ++leaf) {
    __builtin_prefetch(*leaf);
  }
  c10::SmallVector<const at::Tensor*, kBlock> tensors;
  for (PyObject** leaf = leaves + index; leaf != end; ++leaf) {
    if (IsTensor(*leaf)) {
      tensors.push_back(&THPVariable_Unpack(*leaf));
    }
  }
  abi::Prefetch(tensors);
}

void TensorReader::Read(PyObject* object) {
  tensor = &TensorIn(object);
  const bool requires_grad = THPVariable_Unpack(object).requires_grad();
  facts.clear();
  hooks.clear();
  kind = THPVariable_CheckTypeExact(Py_TYPE(object)) ? nullptr : Py_TYPE(object);
  data = nullptr;
  buffer = nullptr;
  auto state = abi::TensorState::kMaterialized;
  if (const std::optional<abi::HeldArray> held = abi::HeldBy(*tensor)) {
    data = held->tensor;
    buffer = held->buffer;
    sizes = held->sizes;
  } else {
    resolved_ = abi::Resolve(*tensor);
    state = resolved_.state;
    data = &resolved_.tensor;
    buffer = resolved_.buffer == nullptr ? nullptr : &resolved_.buffer;
    if (state == abi::TensorState::kDynamic || tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      dynamic = true;
      return;
    }
    sizes = tensor->sizes();
  }
  // After Resolve(), which may wait while another thread removes a hook.
  PyObject* const registered = requires_grad ? reinterpret_cast<THPVariable*>(object)->backward_hooks : nullptr;
  if (registered != nullptr && PyDict_Check(registered) != 0) {
    PyObject* hook = nullptr;
    for (Py_ssize_t next = 0; PyDict_Next(registered, &next, nullptr, &hook) != 0;) {
      hooks.push_back(hook);
    }
  }
  const bool is_xla = state != abi::TensorState::kNotXla;
  const bool is_parameter = reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
  facts.push_back((static_cast<std::int64_t>(sizes.size()) << 32) + ((tensor->device().index() + 1) << 16) +
                  (static_cast<int>(tensor->scalar_type()) << 4) + (requires_grad ? 1 : 0) + (is_xla ? 0 : 2) +
                  (kind == nullptr ? 0 : 4) + (is_parameter ? 8 : 0));
  facts.append(sizes.begin(), sizes.end());
  facts.push_back(static_cast<std::int64_t>(hooks.size()));
  if (buffer == nullptr) {
    pending = pending || is_xla;
    distinct = false;
    facts.push_back(-1);
    return;
  }
  const std::uint32_t number = buffers_.Add(buffer->get());
  distinct = distinct && number == count_++;
  facts.push_back((static_cast<std::int64_t>(abi::ElementTypeOf(**buffer)) << 32) + number);
}

Signature SignatureOf(const py::list& leaves) {
  py::list others, hooks;
  std::vector<int> devices;
  std::string key;
  key.reserve(leaves.size() * 5 * sizeof(std::int64_t));
  const auto put = [&key](const std::int64_t* facts, std::size_t count) {
    key.append(reinterpret_cast<const char*>(facts), count * sizeof *facts);
  };
  PyObject** items = PySequence_Fast_ITEMS(leaves.ptr());
  const std::size_t count = leaves.size();
  TensorReader reader(count);
  for (std::size_t i = 0; i < count; ++i) {
    PrefetchLeaves(items, i, count);
    if (IsTensor(items[i])) {
      AddDevice(THPVariable_Unpack(items[i]), devices);
      reader.Read(items[i]);
      if (reader.kind != nullptr) {
        others.append(py::handle(reinterpret_cast<PyObject*>(reader.kind)));
      }
      for (PyObject* hook : reader.hooks) {
        hooks.append(py::handle(hook));
      }
      put(reader.facts.data(), reader.facts.size());
    } else {
      put(&kNoTensor, 1);
      others.append(py::handle(items[i]));
    }
  }
  return {py::bytes(key),  std::move(devices), reader.pending,  reader.dynamic,
          reader.distinct, std::move(others),  std::move(hooks)};
}

std::vector<int> DevicesOf(const py::list& leaves) {
  std::vector<int> devices;
  for (py::handle leaf : leaves) {
    if (IsTensor(leaf.ptr())) {
      AddDevice(THPVariable_Unpack(leaf.ptr()), devices);
    }
  }
  return devices;
}

}  // namespace torch_xla_donate
