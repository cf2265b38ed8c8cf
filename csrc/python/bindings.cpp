// The Python module torch_xla_donate._C: thin, typed (see _C.pyi), every function documented beside its binding.
#include <c10/util/ScopeExit.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/lazy/core/ir_util.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "features/auto_donors.h"
#include "features/backward_threads.h"
#include "features/compiled_run.h"
#include "features/donor_plans.h"
#include "features/outdated_tensors.h"
#include "features/output_check.h"
#include "features/prediction.h"
#include "features/reuse_warnings.h"
#include "features/run_guard.h"
#include "features/run_probe.h"
#include "features/switches.h"
#include "features/use_guard.h"
#include "host/array_text.h"
#include "host/torch_xla_abi.h"
#include "registry/registry.h"
#include "step/callbacks.h"
#include "step/graph_arrays.h"
#include "step/hooks.h"
#include "step/thread_step.h"
#include "step/watch.h"

namespace py = pybind11;

namespace torch_xla_donate {

namespace {

// A call's `names` object may lose its last owner on a thread without the GIL. It is parked here, and dropped when
// Python comes by next.
struct Graveyard {
  std::mutex mutex;
  std::vector<PyObject*> objects;

  static Graveyard& Get() {
    static Graveyard* graveyard = new Graveyard();
    return *graveyard;
  }
  void Bury(PyObject* object) {
    std::lock_guard<std::mutex> lock(mutex);
    objects.push_back(object);
  }
  void Empty() {
    std::vector<PyObject*> taken;
    {
      std::lock_guard<std::mutex> lock(mutex);
      taken.swap(objects);
    }
    for (PyObject* object : taken) {
      Py_DECREF(object);
    }
  }
};

std::shared_ptr<void> Share(py::object names) {
  return {names.release().ptr(), [](void* object) { Graveyard::Get().Bury(static_cast<PyObject*>(object)); }};
}

// What has been raised travels as torch's own exception, which holds it through any host code.
[[noreturn]] void PassOn(py::error_already_set& error) {
  error.restore();
  python_error ours;
  ours.persist();
  throw ours;
}

// The names of a donor's leaves, joined: "weight, tied.weight". Needs the GIL. A name that cannot be had is left out;
// what ends the program is passed on.
std::string NamesOf(const Donor& donor) {
  std::string result;
  for (const Holder& holder : donor.holders) {
    try {
      const py::handle names(static_cast<PyObject*>(holder.site->names.get()));
      const auto name = names.attr("name")(holder.leaf).cast<std::string>();
      if (!name.empty()) {
        result += (result.empty() ? "" : ", ") + name;
      }
    } catch (py::error_already_set& error) {  // of the user's own containers
      if (!error.matches(PyExc_Exception)) {
        throw;
      }
    } catch (const py::cast_error&) {
    }
  }
  return result;
}

// Where the donor was marked; empty for one that nobody has marked.
std::string WhereOf(const Donor& donor) { return donor.holders.empty() ? "" : donor.holders.front().site->where; }

const at::Tensor& TensorOf(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error(std::string("expected a torch.Tensor, got ") + Py_TYPE(object.ptr())->tp_name);
  }
  return THPVariable_Unpack(object.ptr());
}

// What stands in the way of marking a leaf; "" is nothing.
const char* Obstacle(const abi::Resolution& resolved) {
  switch (resolved.state) {
    case abi::TensorState::kMaterialized: return "";
    case abi::TensorState::kPending: return "pending";
    case abi::TensorState::kReadOnly: return "read_only";
    case abi::TensorState::kViewed: return "viewed";
    case abi::TensorState::kDynamic: return "dynamic";
    case abi::TensorState::kNotXla: return "not_xla";
  }
  return "not_xla";
}

// A call's marks, for taking them back. What is still pending of them goes with it, as where an interrupt has hit its
// caller.
struct Call {
  std::shared_ptr<CallSite> site;
  std::vector<std::uint32_t> constants;  // positions of leaves in buffers that torch_xla shares between tensors
  std::vector<std::weak_ptr<lazy::BackendData>> buffers;  // of the leaves, whoever marked them first
  bool is_scope = false;                                  // the marks end with this object, at the latest

  explicit Call(std::shared_ptr<CallSite> of) : site(std::move(of)) {}
  Call(Call&&) = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (site != nullptr && is_scope) {
      DonationRegistry::Get().CancelCall(site.get());
    }
  }
};

// Whether the tensor has work that replaces a buffer which it had before, and which that work reads.
bool UpdatedInPlace(const at::Tensor& tensor) {
  const abi::Resolution resolved = abi::Resolve(tensor);
  if (resolved.state != abi::TensorState::kPending || !resolved.tensor->ir_value) {
    return false;
  }
  const std::int64_t id = abi::AliasId(*resolved.tensor);
  for (const lazy::Node* node : lazy::Util::ComputePostOrder({resolved.tensor->ir_value.node.get()})) {
    const lazy::BackendDataPtr buffer = lazy::getBackend()->GetComputationDataFromNode(node);
    const abi::DeviceDataInfo* info = buffer == nullptr ? nullptr : abi::InfoOf(*buffer);
    if (info != nullptr && !info->read_only && info->tensor_id == id) {
      return true;
    }
  }
  return false;
}

// One wish for donation to be disabled.
class DisablingScope {
 public:
  DisablingScope(bool report_reuse, bool check_outputs) : wishes_{report_reuse, check_outputs} {}
  void On() {
    if (!std::exchange(on_, true)) {
      PushDonationDisabled(wishes_);
    }
  }
  void Off() {
    if (std::exchange(on_, false)) {
      PopDonationDisabled(wishes_);
    }
  }

 private:
  Disabling wishes_;
  bool on_ = false;
};

// A context whose entering and leaving no interrupt can cut in two. Python looks for signals between calls and at the
// begin of each function, so that a context manager written in Python may be interrupted after it has done its work and
// before `with` knows of it, or before the first line of its __exit__. Here Python enters and leaves functions that are
// none of its own. `leave` is called again if an interrupt stops it, and so has to bear that.
struct Scope {
  py::object lock;  // held inside; None for none
  int held = 0;

  void Acquire() {
    if (!lock.is_none()) {
      lock.attr("acquire")();
      ++held;
    }
  }
  void Release() {
    if (held > 0) {
      --held;
      lock.attr("release")();
    }
  }
};

void Leave(const py::object& self, bool raised) {
  constexpr int kAttempts = 10;
  const auto release = c10::make_scope_exit([&self] { self.cast<Scope&>().Release(); });
  std::optional<py::error_already_set> interrupt;
  for (int attempt = 1; attempt <= kAttempts; ++attempt) {
    try {
      self.attr("leave")(raised);
      break;
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_Exception)) {
        throw;
      }
      interrupt.emplace(error);
    }
  }
  if (interrupt.has_value()) {
    throw py::error_already_set(*interrupt);
  }
}

py::object Enter(const py::object& self) {
  self.cast<Scope&>().Acquire();
  try {
    self.attr("enter")();
  } catch (const py::error_already_set&) {
    Leave(self, /*raised=*/true);
    throw;
  }
  return self;
}

void Exit(const py::object& self, const py::object& kind, const py::object&, const py::object&) {
  const bool raised = !kind.is_none();
  try {
    if (!raised) {
      self.attr("finish")();
    }
  } catch (const py::error_already_set&) {
    Leave(self, /*raised=*/true);
    throw;
  }
  Leave(self, raised);
}

std::shared_ptr<CallSite> SiteOf(const std::string& where, bool strict, py::object names) {
  auto site = std::make_shared<CallSite>();
  site->where = where;
  site->strict = strict;
  site->names = Share(std::move(names));
  return site;
}

// Marks leaves that have been found fit, of which the items are the tensors.
void Commit(const std::vector<DonationRegistry::Leaf>& resolved, PyObject** items,
            const std::shared_ptr<const CallSite>& site) {
  // One look at all of them. Where a step is still running with one, its end tells whether the buffer was used.
  for (std::size_t i = DonationRegistry::Get().FirstTracked(resolved); i < resolved.size(); ++i) {
    ThrowIfConsumed(resolved[i].buffer.get());
  }
  if (Watches(kSpared)) {
    for (const DonationRegistry::Leaf& leaf : resolved) {
      ReportReuse(leaf.buffer.get());
    }
  }
  OutdatedTensors::FollowAliases();
  DonationRegistry::Get().Mark(resolved, site);
  for (const DonationRegistry::Leaf& leaf : resolved) {
    abi::InvalidateViews(THPVariable_Unpack(items[leaf.index]));
  }
}

py::object Mark(const py::sequence& leaves, const std::string& where, bool strict, py::object names,
                const py::dict& targets) {
  Graveyard::Get().Empty();
  const py::ssize_t count = PySequence_Fast_GET_SIZE(leaves.ptr());
  PyObject** items = PySequence_Fast_ITEMS(leaves.ptr());
  std::vector<DonationRegistry::Leaf> resolved;
  resolved.reserve(static_cast<std::size_t>(count));
  for (py::ssize_t i = 0; i < count; ++i) {
    const auto refuse = [i](const char* obstacle) { return py::make_tuple(i, obstacle); };
    if (items[i] == Py_None) {
      continue;
    }
    if (!THPVariable_Check(items[i])) {
      return refuse("not_tensor");
    }
    const at::Tensor& tensor = THPVariable_Unpack(items[i]);
    abi::Resolution leaf = abi::Resolve(tensor);
    const char* obstacle = Obstacle(leaf);
    if (*obstacle != '\0') {
      return refuse(obstacle);
    }
    resolved.push_back({std::move(leaf.tensor), std::move(leaf.buffer), tensor.sizes(), tensor.scalar_type(),
                        static_cast<std::uint32_t>(i),
                        targets.contains(i) ? abi::Resolve(TensorOf(targets[py::int_(i)])).tensor : nullptr});
  }
  Call call(SiteOf(where, strict, std::move(names)));
  Commit(resolved, items, call.site);
  for (const DonationRegistry::Leaf& leaf : resolved) {
    call.buffers.push_back(leaf.buffer);
  }
  return py::cast(std::move(call));
}

py::object MarkArguments(const py::list& donated, const py::list& kept, const std::string& where, bool strict,
                         bool held, py::object names) {
  Graveyard::Get().Empty();
  PyObject** items = PySequence_Fast_ITEMS(donated.ptr());
  std::vector<DonationRegistry::Leaf> resolved;
  std::vector<std::uint32_t> constants;
  ska::flat_hash_map<const lazy::BackendData*, std::size_t> by_buffer;
  resolved.reserve(donated.size());
  by_buffer.reserve(donated.size());
  for (std::size_t i = 0; i < donated.size(); ++i) {
    if (!THPVariable_Check(items[i])) {
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(items[i]);
    abi::Resolution leaf = abi::Resolve(tensor);
    const char* obstacle = leaf.state == abi::TensorState::kReadOnly ? "" : Obstacle(leaf);
    if (*obstacle != '\0') {
      return py::make_tuple(i, obstacle);
    }
    by_buffer.emplace(leaf.buffer.get(), i);
    if (leaf.state == abi::TensorState::kReadOnly) {
      constants.push_back(static_cast<std::uint32_t>(i));
    }
    resolved.push_back({std::move(leaf.tensor), std::move(leaf.buffer), tensor.sizes(), tensor.scalar_type(),
                        static_cast<std::uint32_t>(i), nullptr});
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (PyObject* item = PyList_GET_ITEM(kept.ptr(), static_cast<py::ssize_t>(i)); THPVariable_Check(item)) {
      const auto found = by_buffer.find(abi::Resolve(THPVariable_Unpack(item)).buffer.get());
      const auto* info = found == by_buffer.end() ? nullptr : abi::InfoOf(*found->first);
      if (found != by_buffer.end() && found->first != nullptr && (info == nullptr || !info->read_only)) {
        return py::make_tuple(found->second, i, "also_kept");
      }
    }
  }
  if (!resolved.empty()) {
    NoteDevice(resolved.front().buffer->device());
  }
  Call call(SiteOf(where, strict, std::move(names)));
  call.constants = std::move(constants);
  call.is_scope = true;
  call.site->held = held;
  Commit(resolved, items, call.site);
  // An argument that is a view has its value, which it would work out again from a base that the call consumes.
  for (const py::list* arguments : {&donated, &kept}) {
    for (const py::handle argument : *arguments) {
      if (THPVariable_Check(argument.ptr())) {
        abi::KeepValue(THPVariable_Unpack(argument.ptr()));
      }
    }
  }
  return py::cast(std::move(call));
}

// Takes back the marks of the buffers that the outputs hold.
void KeepReturned(const py::list& outputs) {
  std::vector<lazy::BackendDataPtr> buffers;
  for (py::handle item : outputs) {
    if (THPVariable_Check(item.ptr())) {
      if (abi::Resolution output = abi::Resolve(THPVariable_Unpack(item.ptr())); output.buffer != nullptr) {
        buffers.push_back(std::move(output.buffer));
      }
    }
  }
  if (!buffers.empty()) {
    DonationRegistry::Get().Cancel(buffers);
  }
}

// Appends what a builtin container holds; false if anything in it needs more than that. The tokens tell structures
// apart: types, keys and sizes in preorder.
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

// The inverse: takes tokens from `token` on, and leaves from `leaf` on.
py::object Unflatten(const py::list& leaves, const py::tuple& tokens, py::ssize_t& leaf, py::ssize_t& token) {
  const py::handle type = tokens[static_cast<std::size_t>(token++)];
  if (type.is_none()) {
    return leaves[static_cast<std::size_t>(leaf++)];
  }
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyDict_Type)) {
    py::dict result;
    for (py::handle key : py::tuple(tokens[static_cast<std::size_t>(token++)])) {
      result[key] = Unflatten(leaves, tokens, leaf, token);
    }
    return result;
  }
  const py::ssize_t count = tokens[static_cast<std::size_t>(token++)].cast<py::ssize_t>();
  py::list result(static_cast<std::size_t>(count));
  for (py::ssize_t i = 0; i < count; ++i) {
    PyList_SET_ITEM(result.ptr(), i, Unflatten(leaves, tokens, leaf, token).release().ptr());
  }
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyTuple_Type)) {
    return py::tuple(result);
  }
  return result;
}

// What a graph is compiled for, of its tensor inputs: sizes, dtype, device, whether a gradient is wanted, and which of
// them share a buffer. None for the rest.
py::tuple Signature(const py::list& leaves) {
  std::string key;
  key.reserve(leaves.size() * 5 * sizeof(std::int64_t));
  bool pending = false;
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
  py::list others;
  const auto put = [&key](std::int64_t value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(leaves.ptr(), static_cast<py::ssize_t>(i));
    if (!THPVariable_Check(item)) {
      put(-1);
      others.append(py::handle(item));
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    const abi::Resolution resolved = abi::Resolve(tensor);
    if (resolved.state == abi::TensorState::kDynamic) {
      throw py::value_error(
          "an argument's size is known to the device alone, and a graph is compiled for sizes. Use the lazy backend, "
          "without pure=True.");
    }
    put(tensor.dim());
    for (std::int64_t size : tensor.sizes()) {
      put(size);
    }
    put(static_cast<std::int64_t>(tensor.scalar_type()) * 4 + (tensor.requires_grad() ? 1 : 0) +
        (resolved.state == abi::TensorState::kNotXla ? 2 : 0));
    put(tensor.device().has_index() ? tensor.device().index() : -1);
    if (resolved.buffer == nullptr) {
      pending = pending || resolved.state != abi::TensorState::kNotXla;
      put(-1);
    } else {
      put(static_cast<std::int64_t>(first.emplace(resolved.buffer.get(), i).first->second));
    }
  }
  return py::make_tuple(py::bytes(key), pending, others);
}

// A donor as XLA writes it. What is consumed is not looked at.
std::string ArrayOf(const Donor& donor) {
  const lazy::BackendDataPtr buffer =
      donor.array.empty() && donor.state != DonorState::kDonated ? donor.buffer.lock() : nullptr;
  return buffer == nullptr ? donor.array : abi::DescribeBuffer(*buffer);
}

py::dict DonorDict(const Donor& donor) {
  static const char* const states[] = {"pending", "claimed", "donated", "unusable", "cancelled"};
  py::dict result;
  result["name"] = NamesOf(donor);
  py::list holders;
  for (const Holder& holder : donor.holders) {
    holders.append(py::make_tuple(py::reinterpret_borrow<py::object>(static_cast<PyObject*>(holder.site->names.get())),
                                  holder.leaf));
  }
  result["holders"] = holders;
  result["where"] = WhereOf(donor);
  result["strict"] = donor.Strict();
  result["shape"] = donor.Shape();
  result["bytes"] = donor.bytes;
  const std::string array = ArrayOf(donor);
  result["array"] = array;
  result["bytes_per_device"] = BytesPerDevice(array).value_or(donor.bytes);
  result["buffer"] = reinterpret_cast<std::uintptr_t>(donor.buffer.lock().get());
  result["device"] = donor.device.toString();
  result["outcome"] = states[static_cast<int>(donor.state)];
  result["reason"] = donor.reason;
  result["told"] = donor.told;
  result["automatic"] = donor.automatic;
  result["parameter"] = donor.parameter;
  result["successor"] = donor.successor;
  return result;
}

py::list StepDicts(const std::vector<StepSnapshot>& steps) {
  py::list result;
  for (const StepSnapshot& step : steps) {
    py::list donors;
    for (const Donor& donor : step.donors) {
      donors.append(DonorDict(donor));
    }
    py::dict item;
    item["number"] = step.number;
    item["graph"] = step.graph_hash;
    item["status"] = step.status;
    item["failure"] = step.failure;
    item["donors"] = donors;
    item["outputs"] = step.outputs;
    item["plain_before"] = step.plain_before;
    result.append(item);
  }
  return result;
}

// What the next step would do with the pending marks; see prediction.h.
py::dict LookAheadWith(const at::Tensor& stand_in, const py::object& sharding_of) {
  const std::vector<std::shared_ptr<abi::TensorData>> live = ListedTensors();
  ShardingOf ask;
  if (!sharding_of.is_none()) {
    ask = [&](const std::shared_ptr<abi::TensorData>& tensor) {
      const abi::StandIn stands_for(stand_in, tensor);
      return sharding_of().cast<std::string>();
    };
  }
  const Outlook outlook = LookAhead(live, ask);
  std::map<const lazy::BackendData*, Donor> marked;
  for (const Donor& donor : DonationRegistry::Get().Pending()) {
    if (!donor.Held()) {
      marked.emplace(donor.buffer.lock().get(), donor);
    }
  }
  py::set shared;
  for (const std::shared_ptr<abi::TensorData>& tensor : live) {
    const auto found = tensor == nullptr ? marked.end() : marked.find(tensor->handle.get());
    if (found != marked.end() && !found->second.HeldBy(tensor.get())) {
      shared.add(reinterpret_cast<std::uintptr_t>(found->first));
    }
  }
  const std::size_t count = outlook.parameters.size();
  std::vector<lazy::BackendDataPtr> parameters;
  std::vector<std::string> arrays;
  std::vector<ArraySize> bytes, output_bytes;  // as a step compares them before it is compiled
  std::vector<bool> donors(count);
  std::vector<std::optional<std::size_t>> wanted(count);
  for (const std::string& output : outlook.outputs) {
    output_bytes.push_back(SizeOf(output, /*unsharded=*/ask != nullptr));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [buffer, own] = outlook.parameters[i];
    parameters.push_back(buffer);
    arrays.push_back(abi::DescribeBuffer(*buffer));
    bytes.push_back(SizeOf(arrays.back(), /*unsharded=*/ask != nullptr));
    const auto found = marked.find(buffer.get());
    const bool is_marked = found != marked.end() && !shared.contains(reinterpret_cast<std::uintptr_t>(buffer.get()));
    donors[i] = own.has_value() || is_marked;
    wanted[i] = own;
    const auto target = is_marked ? found->second.Target() : nullptr;
    const auto output = std::find(outlook.tensors.begin(), outlook.tensors.end(), target.get());
    if (target != nullptr && output != outlook.tensors.end()) {
      wanted[i] = static_cast<std::size_t>(output - outlook.tensors.begin());
    }
  }
  std::vector<std::size_t> order =
      PairDonors({bytes, output_bytes, /*movable=*/std::vector<bool>(outlook.roots.size(), true), donors,
                  /*offered=*/std::vector<bool>(count, false), wanted, NearParameters(parameters, outlook.roots)})
          .parameter_order;
  std::vector<bool> ordered(count);
  for (const std::size_t i : order) {
    ordered[i] = true;
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!ordered[i] && (donors[i] || marked.count(parameters[i].get()) != 0)) {
      order.push_back(i);
    }
  }
  py::list inputs;
  for (const std::size_t i : order) {
    inputs.append(py::make_tuple(reinterpret_cast<std::uintptr_t>(parameters[i].get()), BytesPerDevice(arrays[i])));
  }
  py::dict result;
  result["inputs"] = inputs;
  result["outputs"] = outlook.outputs;
  result["shared"] = shared;
  result["complete"] = outlook.complete;
  return result;
}

std::string DescribeUse(const Donor& donor, std::uint64_t step, const py::object& format) {
  if (Py_IsInitialized() == 0) {
    return donor.Shape() + " was donated at " + WhereOf(donor);
  }
  py::gil_scoped_acquire gil;
  try {
    // A signal may have come while the step was waited for. It goes first, not within what asks for names.
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    return format(NamesOf(donor), donor.Shape(), WhereOf(donor), step).cast<std::string>();
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

// A filter may make the warning an error.
void TellReuse(const Donor& donor, std::uint64_t step, const py::object& report) {
  if (Py_IsInitialized() == 0) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    report(NamesOf(donor), donor.Shape(), WhereOf(donor), step);
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

py::list BadOutputDicts(const std::vector<BadOutput>& outputs) {
  py::list result;
  for (const BadOutput& output : outputs) {
    py::dict item;
    item["compiled"] = output.compiled;
    item["index"] = output.index;
    item["outputs"] = output.outputs;
    item["array"] = output.array;
    item["values"] = output.values;
    item["nans"] = output.nans;
    item["infs"] = output.infs;
    result.append(item);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Hooks into torch_xla's lazy graph executor, and the registry of donation marks.";

  m.def(
      "set_callbacks",
      [](py::object donated_buffer_error, py::object format_use, py::object report_reuse, py::object step_ended,
         py::object prepare_auto, py::object set_collectives_token) {
        HookCallbacks callbacks;
        callbacks.donated_buffer_error = donated_buffer_error.release().ptr();
        // Kept for the life of the process, as the hooks are.
        auto* format = new py::object(std::move(format_use));
        auto* reuse = new py::object(std::move(report_reuse));
        auto* ended = new py::object(std::move(step_ended));
        auto* prepare = new py::object(std::move(prepare_auto));
        auto* set_token = new py::object(std::move(set_collectives_token));
        callbacks.describe_use = [format](const Donor& donor, std::uint64_t step) {
          return DescribeUse(donor, step, *format);
        };
        callbacks.report_reuse = [reuse](const Donor& donor, std::uint64_t step) { TellReuse(donor, step, *reuse); };
        callbacks.step_ended = [ended] {
          py::gil_scoped_acquire gil;
          (*ended)();
        };
        callbacks.prepare_auto = [prepare]() -> std::string {
          py::gil_scoped_acquire gil;
          try {
            return (*prepare)().cast<std::string>();
          } catch (py::error_already_set& error) {
            PassOn(error);
          }
        };
        callbacks.forget_collectives = [set_token](const std::string& device) {
          py::gil_scoped_acquire gil;
          (*set_token)(device, py::none());
        };
        SetHookCallbacks(std::move(callbacks));
      },
      py::arg("donated_buffer_error"), py::arg("format_use"), py::arg("report_reuse"), py::arg("step_ended"),
      py::arg("prepare_auto"), py::arg("set_collectives_token"),
      "Lends the hooks an exception type, the text of its message, and what to call where a spared donor is used, at "
      "the end of a step, and before the first step that donates automatically; and torch_xla's own function, which is "
      "no Python code, by which a step that may donate drops the token of collectives.");

  // torch_xla's own pybind11 functions translate foreign C++ exceptions by this list, which all modules share.
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (DonatedBufferAccess& access) {
      PyErr_SetString(access.python_type(), access.what());
    } catch (python_error& raised) {
      raised.restore();
    }
  });

  m.def("install", &InstallHooks, py::arg("library_path"),
        "Patches the extension module of torch_xla; RuntimeError if that cannot be done completely.");
  m.def("uninstall", &UninstallHooks, "Puts the module back; the number of slots that somebody else holds.");
  m.def("installed", &HooksInstalled, "Whether the hooks are in place.");
  m.def(
      "hooks",
      [] {
        py::list result;
        for (const HookInfo& hook : Hooks()) {
          py::dict item;
          item["name"] = hook.name;
          item["library"] = hook.library;
          item["symbol"] = hook.symbol;
          item["purpose"] = hook.purpose;
          item["slots"] = hook.slots;
          item["in_place"] = hook.in_place;
          result.append(item);
        }
        return result;
      },
      "The table of hooks: name, library, symbol, purpose, slots patched and slots still in place.");
  m.def(
      "verify_layouts", [](py::handle probe, std::int64_t id) { abi::VerifyLayouts(TensorOf(probe), id); },
      py::arg("probe"), py::arg("tensor_id"),
      "Compares an uploaded int32[3] tensor with the layouts relied on; RuntimeError names the first difference.");

  m.def("mark", &Mark, py::arg("leaves"), py::arg("where"), py::arg("strict"), py::arg("names"), py::arg("targets"),
        "Marks a list or tuple of tensors (None is skipped), all or none; targets maps positions to the tensors that "
        "should take the buffers over. Returns a Call, or (index, obstacle) of the first leaf that cannot be marked. "
        "Raises DonatedBufferError for a leaf that was donated before.");
  py::class_<Scope>(m, "Scope", py::dynamic_attr(),
                    "Base of contexts that an interrupt cannot leave half entered or half left: subclasses have "
                    "enter(), leave(raised), which may be called again, and finish(), before leave() if nothing was "
                    "raised. A lock is held inside.")
      .def(py::init([](py::object lock) { return Scope{std::move(lock)}; }), py::arg("lock") = py::none())
      .def("enter", [](const py::object&) {})
      .def(
          "leave", [](const py::object&, bool) {}, py::arg("raised"))
      .def("finish", [](const py::object&) {})
      .def("__enter__", &Enter)
      .def("__exit__", &Exit, py::arg("kind"), py::arg("error"), py::arg("trace"));
  py::class_<Call>(m, "Call", "The marks of one call of mark_arguments.")
      .def_readonly("constants", &Call::constants, "Positions of leaves that are cached constants of torch_xla.");
  m.def(
      "mark_arguments", &MarkArguments, py::arg("donated"), py::arg("kept"), py::arg("where"), py::arg("strict"),
      py::arg("held"), py::arg("names"),
      "Marks the tensors of a call's donated leaves, all or none; what is no tensor is passed over. Held marks are for "
      "arm_run alone, steps pass them over. Returns a Call, or (index, obstacle) of the first leaf that cannot be "
      "marked, or (index, index in kept, 'also_kept') of a buffer that a leaf of kept holds, too. Cached constants are "
      "marked; the step refuses them, with a reason.");
  m.def(
      "cancel_call", [](const Call& call) { DonationRegistry::Get().CancelCall(call.site.get()); }, py::arg("call"),
      "Takes back what is still pending of a call's marks.");
  m.def(
      "cancel_marks",
      [](const Call& call) {
        std::vector<lazy::BackendDataPtr> buffers;
        for (const std::weak_ptr<lazy::BackendData>& weak : call.buffers) {
          if (lazy::BackendDataPtr buffer = weak.lock(); buffer != nullptr) {
            buffers.push_back(std::move(buffer));
          }
        }
        DonationRegistry::Get().Cancel(buffers);
      },
      py::arg("call"), "Takes back what is still pending of the marks of the buffers that a call of mark was given.");
  m.def(
      "end_call",
      [](const Call& call, const std::unordered_map<std::uint32_t, std::string>& reasons, const std::string& reason,
         bool tell) { DonationRegistry::Get().EndCall(call.site.get(), reasons, reason, tell); },
      py::arg("call"), py::arg("reasons"), py::arg("reason"), py::arg("tell"),
      "What is still pending of a call's marks was unusable, for the reason of its position or for the general one.");
  m.def(
      "perhaps_shared",
      [](const Call& call) {
        const DonationRegistry& registry = DonationRegistry::Get();
        std::vector<std::uint32_t> leaves = registry.PerhapsShared(call.site.get());
        if (!leaves.empty()) {
          // A run that is being started holds its outputs, which are the donors of the next call in a loop. That call's
          // own run would wait for it here, too.
          py::gil_scoped_release released;
          registry.WaitForHandOver(call.site.get());
          leaves = registry.PerhapsShared(call.site.get());
        }
        return leaves;
      },
      py::arg("call"),
      "Positions of a call's leaves whose buffers may have another holder or a pending reader. Complete, not exact.");
  m.def(
      "shared_with_listed",
      [](const Call& call) { return DonationRegistry::Get().SharedWith(ListedTensors(), call.site.get()); },
      py::arg("call"),
      "Positions of a call's leaves whose buffers an unmarked live tensor holds. Right after a list of live tensors.");
  m.def(
      "marked_by",
      [](const Call& call, const py::sequence& arguments) {
        std::vector<std::pair<std::size_t, std::uint32_t>> result;
        std::size_t position = 0;
        for (py::handle argument : arguments) {
          if (THPVariable_Check(argument.ptr())) {
            const abi::Resolution resolved = abi::Resolve(THPVariable_Unpack(argument.ptr()));
            if (const auto leaf = DonationRegistry::Get().LeafOf(resolved.buffer.get(), call.site.get())) {
              result.emplace_back(position, *leaf);
            }
          }
          ++position;
        }
        return result;
      },
      py::arg("call"), py::arg("arguments"),
      "Which arguments hold buffers that the call has marked: (position, position among the call's leaves).");
  m.def(
      "arm_run",
      [](const Call& call, const py::sequence& donors, const std::string& graph,
         const std::vector<std::pair<std::optional<std::size_t>, std::optional<std::size_t>>>& places) {
        std::vector<RunDonor> buffers;
        buffers.reserve(donors.size());
        ska::flat_hash_set<const lazy::BackendData*> known;
        known.reserve(donors.size());
        for (std::size_t i = 0; i < donors.size(); ++i) {
          lazy::BackendDataPtr buffer = abi::Resolve(TensorOf(donors[i])).buffer;
          if (known.insert(buffer.get()).second) {
            buffers.push_back({std::move(buffer), places.at(i).first, places.at(i).second});
          }
        }
        DonateToNextRun(call.site, std::move(buffers), graph);
      },
      py::arg("call"), py::arg("donors"), py::arg("graph"), py::arg("places"),
      "The next run of a compiled graph on this thread consumes the buffers of these tensors, which the call has "
      "marked. "
      "places: for each its number among the graph's parameters and that of the output computed from it, as far as "
      "they "
      "are known.");
  m.def(
      "order_parameters",
      [](const py::sequence& donors) {
        std::unordered_set<const lazy::BackendData*> buffers;
        for (py::handle tensor : donors) {
          buffers.insert(abi::Resolve(TensorOf(tensor)).buffer.get());
        }
        OrderParameters(std::move(buffers));
      },
      py::arg("donors"),
      "Until take_order, graphs that this thread hashes or compiles have their parameters in an order with which XLA "
      "gives each of these donors to the output computed from it.");
  m.def(
      "take_order",
      [] {
        std::vector<std::pair<std::uintptr_t, std::optional<std::size_t>>> result;
        for (const OrderedParameter& parameter : TakeOrder()) {
          result.emplace_back(reinterpret_cast<std::uintptr_t>(parameter.buffer), parameter.successor);
        }
        return result;
      },
      "Ends order_parameters. For each parameter of the last graph, in its order: the buffer (as in identity), and the "
      "number of the output computed from it if it is a donor.");
  m.def("inspect_next_run", &InspectNextRun,
        "The next run of a compiled graph on this thread raises RuntimeError instead of running.");
  m.def(
      "take_inspected",
      []() -> py::object {
        const auto graph = TakeInspected();
        return graph.has_value() ? py::object(py::make_tuple(graph->text, graph->memory)) : py::none();
      },
      "(optimised HLO, memory statistics) of the run that inspect_next_run has stopped; None if there was none.");
  m.def("disarm_run", &DisarmRun, "Ends arm_run, whether the graph has run or not.");
  m.def(
      "flatten",
      [](py::handle tree) -> py::object {
        py::list leaves, tokens;
        if (!FlattenInto(tree.ptr(), leaves, tokens)) {
          return py::none();
        }
        return py::make_tuple(leaves, py::tuple(tokens));
      },
      py::arg("tree"),
      "Leaves and structure (hashable) of dicts, lists and tuples, in the order of torch's pytrees; None for a tree "
      "with "
      "anything else in it.");
  m.def(
      "unflatten",
      [](const py::list& leaves, const py::tuple& tokens) {
        py::ssize_t leaf = 0, token = 0;
        return Unflatten(leaves, tokens, leaf, token);
      },
      py::arg("leaves"), py::arg("tokens"), "The tree of a structure that flatten gave, with other leaves.");
  m.def("signature", &Signature, py::arg("leaves"),
        "(bytes that differ if a graph traced for these tensors does, whether one is pending, what is no tensor).");
  m.def(
      "identity",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        return std::make_pair(reinterpret_cast<std::uintptr_t>(resolved.tensor.get()),
                              reinterpret_cast<std::uintptr_t>(resolved.buffer.get()));
      },
      py::arg("tensor"), "Numbers that tell apart what a tensor shares with its aliases, and its buffer; 0 for none.");
  m.def(
      "has_graph",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        return resolved.tensor != nullptr && resolved.buffer == nullptr && bool(resolved.tensor->ir_value);
      },
      py::arg("tensor"), "Whether the tensor is the result of operations that have not run.");
  m.def(
      "updated_in_place", [](py::handle tensor) { return UpdatedInPlace(TensorOf(tensor)); }, py::arg("tensor"),
      "Whether pending work replaces the tensor's value, and reads the buffer that it had before.");
  m.def("backward_threads", &StepsAfterBackwardThreads,
        "How many steps with marks or automatic donation followed a backward pass on a thread of autograd.");
  m.def("keep_returned", &KeepReturned, py::arg("outputs"),
        "Takes back the marks of buffers that these leaves hold: a function that returns its argument keeps it.");
  m.def(
      "cancel",
      [](const py::sequence& leaves) {
        std::vector<lazy::BackendDataPtr> buffers;
        for (py::handle leaf : leaves) {
          abi::Resolution resolved = abi::Resolve(TensorOf(leaf));
          if (resolved.buffer != nullptr) {
            buffers.push_back(std::move(resolved.buffer));
          }
        }
        return DonationRegistry::Get().Cancel(buffers);
      },
      py::arg("leaves"), "Takes the marks of the tensors' buffers back; how many were pending.");
  m.def(
      "state",
      [](py::handle tensor) -> std::string {
        const DonationRegistry& registry = DonationRegistry::Get();
        // To resolve a view of a consumed tensor is to compute it, which is an error.
        if (const auto buffer = abi::BufferBehind(TensorOf(tensor)); buffer && registry.IsConsumed(buffer.get())) {
          return "donated";
        }
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        const char* obstacle = Obstacle(resolved);
        if (resolved.buffer == nullptr) {
          return obstacle;
        }
        return registry.IsConsumed(resolved.buffer.get())  ? "donated"
               : registry.IsPending(resolved.buffer.get()) ? "marked"
               : *obstacle != '\0'                         ? obstacle
                                                           : "materialized";
      },
      py::arg("tensor"),
      "'donated', 'marked', 'materialized', 'pending', 'read_only', 'viewed', 'dynamic' or 'not_xla'. Never waits.");
  m.def(
      "is_donated",
      [](py::handle tensor) {
        const lazy::BackendDataPtr buffer = abi::BufferBehind(TensorOf(tensor));
        return buffer != nullptr && DonationRegistry::Get().IsConsumed(buffer.get());
      },
      py::arg("tensor"), "Whether a step has consumed what a tensor holds, or is computed from. Never waits.");
  m.def(
      "has_value",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        return resolved.buffer != nullptr && resolved.buffer->HasValue();
      },
      py::arg("tensor"), "Whether the device has computed the tensor's buffer, and it is still there.");

  m.def("expect_run", &ExpectRun,
        "Donors have been refused before the run on this thread that would have read them: it is not a step without.");
  m.def("plain_steps", [] { return DonationRegistry::Get().PlainSteps(); }, "How many steps without donors have run.");
  m.def(
      "graph_text", [](const std::string& graph) { return DonationRegistry::Get().GraphText(graph); }, py::arg("graph"),
      "The optimised HLO of a graph that has run with donors; None if torch_xla has dropped its executable.");
  m.def(
      "steps", [] { return StepDicts(DonationRegistry::Get().Steps()); },
      "The last steps that read marked buffers, oldest first.");
  m.def(
      "pending",
      [] {
        py::list result;
        for (const Donor& donor : DonationRegistry::Get().Pending()) {
          result.append(DonorDict(donor));
        }
        return result;
      },
      "The marks that no step has read yet.");
  m.def("look_ahead", &LookAheadWith, py::arg("stand_in"), py::arg("sharding_of"),
        "Right after a list of live tensors: the arrays that their pending work will make, and of its parameters the "
        "donors, each with its buffer (as in identity), its bytes per device and whether an output is to take it over. "
        "sharding_of (None without SPMD) is called while stand_in, a tensor of nobody else, stands for an output.");
  m.def("bytes_per_device", &BytesPerDevice, py::arg("array"),
        "Of an array as XLA writes it, with its sharding; None if the text is not understood.");
  m.def("is_even", &IsEven, py::arg("array"), "Whether its sharding cuts such an array into pieces of one size.");
  m.def(
      "take_notices",
      [](bool everywhere) {
        return StepDicts(DonationRegistry::Get().TakeNotices(everywhere ? std::nullopt : LastDevice()));
      },
      py::arg("everywhere") = true,
      "Steps with unusable donations that nobody was told of yet. Donors told before carry told=True. Not everywhere: "
      "those of the device that this thread has stepped last, if it has.");
  m.def("verify_executor", &VerifyExecutor, py::arg("eager_mode"), py::arg("allow_execution"),
        "Compares torch_xla's executor with the layout relied on, and with what it says of itself; RuntimeError if it "
        "differs.");
  m.def("refuse_runs", &BlockRuns, py::arg("on"),
        "Whether graphs that this thread is about to run are refused: RuntimeError, 'Unexpected execution ...'.");
  m.def("runs_begun", &RunsBegun, "How many graphs this thread has begun to run.");
  m.def("barriers_passed", &BarriersPassed,
        "How often this thread has waited for a device, as for a read or a step. Counted while runs are refused.");
  m.def(
      "has_notices", [] { return DonationRegistry::Get().HasNotices(); },
      "Whether take_notices has something to give.");
  m.def(
      "wait_for_steps", [] { DonationRegistry::Get().WaitForSteps(); }, py::call_guard<py::gil_scoped_release>(),
      "Waits until the outcome of every step is known.");
  m.def(
      "sizes",
      [] {
        const DonationRegistry::Counts counts = DonationRegistry::Get().Size();
        py::dict result;
        result["pending"] = counts.pending;
        result["consumed"] = counts.consumed;
        result["spared"] = counts.spared;
        result["steps"] = counts.steps;
        result["outcomes"] = counts.outcomes;
        result["auto_plans"] = DonorPlanner::Get().Size();
        result["bases"] = OutdatedTensors::Get().Size().bases;
        result["outdated"] = OutdatedTensors::Get().Size().outdated;
        return result;
      },
      "How many entries the registry holds.");
  py::class_<DisablingScope>(m, "Disabling",
                             "While it is on, this thread's steps donate nothing; both switches may be thrown again.")
      .def(py::init<bool, bool>(), py::arg("report_reuse"), py::arg("check_outputs"))
      .def("on", &DisablingScope::On)
      .def("off", &DisablingScope::Off);
  m.def("disabled_reason", &DisabledReason, "Who has disabled donation on this thread; empty if nobody has.");
  m.def("switched_off", &SwitchedOffReason, "What set_switched_off has set.");
  m.def("disabled", &DonationDisabled, "Whether donation is disabled on this thread.");
  m.def("set_auto_donate", &SetAutoDonate, py::arg("on"), "Whether steps of all threads donate by liveness.");
  m.def("auto_donate_is_default", &AutoDonateIsDefault, "What set_auto_donate has set.");
  m.def("push_auto_donate", &PushAutoDonate, py::arg("on"),
        "Whether this thread's steps donate by liveness until a pop_auto_donate ends it.");
  m.def("auto_donate_depth", &AutoDonateDepth, "How many push_auto_donate hold on this thread.");
  m.def("pop_auto_donate", &PopAutoDonate, py::arg("depth"), "Ends what this thread has pushed since that depth.");
  m.def("auto_donates", &AutoDonates, "Whether this thread's steps donate by liveness.");
  m.def(
      "note_auto_refusal", [](const std::string& reason) { DonationRegistry::Get().NoteAutoRefusal(reason); },
      py::arg("reason"), "A step that automatic donation has left alone, for this reason.");
  m.def(
      "auto_refusals", [] { return DonationRegistry::Get().AutoRefusals(); },
      "How many steps automatic donation has left alone, by reason.");
  m.def(
      "auto_held",
      [] {
        py::list result;
        for (const HeldInput& input : DonorPlanner::Get().LastHeld()) {
          result.append(py::make_tuple(input.array, input.bytes, input.device.toString(), input.by_tensor,
                                       reinterpret_cast<std::uintptr_t>(input.buffer.lock().get())));
        }
        return result;
      },
      "Inputs of each device's last step that an output could have taken, had nobody held them; none where that step "
      "donated nothing automatically: (array, bytes, device, "
      "whether a live tensor holds it; otherwise pending work reads it, the buffer as in identity, or 0).");
  m.def(
      "holds",
      [](py::handle tensor) {
        const abi::TensorData* data = abi::ValueOf(*TensorOf(tensor).unsafeGetTensorImpl());
        return reinterpret_cast<std::uintptr_t>(data == nullptr ? nullptr : abi::BufferOf(*data).get());
      },
      py::arg("tensor"), "The buffer that a tensor holds (as in identity), without applying what is pending; or 0.");
  m.def("set_one_of_many", &SetMultiProcess, py::arg("on"),
        "Whether other processes run the same program, whose steps must have the same donors.");
  m.def("set_debug_process", &SetDebugProcess, py::arg("on"),
        "Whether donation is disabled, uses are reported and outputs noted on every thread.");
  m.def(
      "take_bad_outputs",
      [](bool infs) {
        std::vector<BadOutput> bad;
        {
          const py::gil_scoped_release release;
          bad = TakeBadOutputs(infs);
        }
        return BadOutputDicts(bad);
      },
      py::arg("infs"),
      "The outputs of this thread's runs since the last call that hold a NaN (or infinity); waits for them.");
  m.def(
      "environment",
      [](const std::string& name) {
        const char* const value = std::getenv(name.c_str());
        return value == nullptr ? std::nullopt : std::optional<std::string>(value);
      },
      py::arg("name"), "A variable of the environment, where torch_xla reads it; None if it is not set.");
  m.def("set_switched_off", &SetSwitchedOff, py::arg("reason"),
        "Names the setting that makes torch_xla ignore every donor; an empty text is none.");
}

}  // namespace torch_xla_donate
