// Marks tensors, cancels marks, and describes what a tensor holds.
#include <c10/util/flat_hash_map.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/ir_util.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "features/outdated_tensors.h"
#include "features/reuse_warnings.h"
#include "features/run_guard.h"
#include "features/switches.h"
#include "features/use_guard.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "host/views.h"
#include "python/bind.h"
#include "python/call.h"
#include "python/deferred_decref.h"
#include "python/pytree.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "registry/watch.h"
#include "step/hooks.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

namespace {

// The obstacle to marking a leaf; "" if there is none.
const char* Obstacle(const abi::Resolution& resolved) {
  switch (resolved.state) {
    case abi::TensorState::kMaterialized: return "";
    case abi::TensorState::kPending: return "pending";
    case abi::TensorState::kReadOnly: return "read_only";
    case abi::TensorState::kViewed: return "viewed";
    case abi::TensorState::kDynamic: return "dynamic";
    case abi::TensorState::kNotXla: break;
  }
  return "not_xla";
}

// Whether pending work replaces the tensor's value and reads the buffer that it had before.
bool UpdatedInPlace(const at::Tensor& tensor) {
  const abi::Resolution resolved = abi::Resolve(tensor);
  if (resolved.state != abi::TensorState::kPending || !resolved.tensor->ir_value) {
    return false;
  }
  const std::int64_t id = abi::AliasId(*resolved.tensor);
  for (const lazy::Node* node : lazy::Util::ComputePostOrder({resolved.tensor->ir_value.node.get()})) {
    const lazy::BackendDataPtr buffer = lazy::getBackend()->GetComputationDataFromNode(node);
    const std::optional<abi::DeviceDataInfo> info = buffer == nullptr ? std::nullopt : abi::InfoOf(*buffer);
    if (info.has_value() && !info->read_only && info->tensor_id == id) {
      return true;
    }
  }
  return false;
}

std::optional<std::size_t> ReadOtherwise(const py::sequence& results, const std::vector<lazy::Value>& nodes) {
  ska::flat_hash_set<const lazy::Node*> own;
  for (const lazy::Value& node : nodes) {
    own.insert(node.node.get());
  }
  std::vector<const lazy::Node*> roots;
  ska::flat_hash_set<const lazy::BackendData*> read;  // other than by one of the nodes
  for (const py::handle result : results) {
    const abi::Resolution resolved = abi::Resolve(TensorOf(result));
    if (resolved.tensor != nullptr && resolved.tensor->ir_value) {
      roots.push_back(resolved.tensor->ir_value.node.get());
    } else {
      read.insert(resolved.buffer.get());
    }
  }
  const auto data_of = [](const lazy::Node* node) {
    return lazy::getBackend()->GetComputationDataFromNode(node).get();
  };
  for (const lazy::Node* node : lazy::Util::ComputePostOrder(roots)) {
    if (own.count(node) == 0) {
      read.insert(data_of(node));
    }
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const lazy::BackendData* buffer = nodes[i] ? data_of(nodes[i].node.get()) : nullptr;
    if (buffer != nullptr && read.count(buffer) != 0) {
      return i;
    }
  }
  return std::nullopt;
}

// Marks the donors of leaves that have no obstacle. `viewed` are those that may have views.
void Commit(const std::shared_ptr<CallDonors>& donors, const std::shared_ptr<const CallSite>& site,
            const std::vector<at::Tensor>& viewed) {
  // Looks up all leaves at once. If a step with one of them is running, only its end shows whether it used the buffer.
  for (std::size_t i = Steps::Get().FirstTracked(*donors); i < donors->Size(); ++i) {
    ThrowIfConsumed((*donors)[i].array.key);
  }
  if (Watches(kUndonated)) {
    for (std::size_t i = 0; i < donors->Size(); ++i) {
      ReportReuse((*donors)[i].array.key);
    }
  }
  OutdatedTensors::FollowAliases();
  for (const at::Tensor& tensor : viewed) {
    abi::InvalidateViews(tensor);
  }
  Marks::Get().Add(donors, site);
  if (Watches(kUndonated)) {
    Steps::Get().ForgetUndonated(*donors);
  }
}

// The outputs that should take the leaves' buffers, by leaf; empty if none is requested.
std::vector<std::shared_ptr<abi::TensorData>> OutputsOf(const py::dict& preferred_outputs, std::size_t leaves) {
  std::vector<std::shared_ptr<abi::TensorData>> outputs;
  if (!preferred_outputs.empty()) {
    outputs.resize(leaves);
  }
  for (const auto& [leaf, output] : preferred_outputs) {
    outputs.at(leaf.cast<std::size_t>()) = abi::Resolve(TensorOf(output)).tensor;
  }
  return outputs;
}

py::object MarkLeaves(const py::sequence& given, const std::string& where, int strict, py::object names,
                      const py::dict& preferred_outputs) {
  RunDeferredDecrefs();
  const py::tuple leaves(given);  // another thread may change a list while this one waits for a step
  PythonCall<Call> made;
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(leaves.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(leaves.ptr());
  const auto site = MakeCallSite(where, strict, std::move(names));
  const auto donors = std::make_shared<CallDonors>(count);
  const auto outputs = OutputsOf(preferred_outputs, count);
  std::vector<at::Tensor> viewed;
  const char* obstacle = "";
  std::size_t i = 0;
  std::optional<abi::InfosLocked> infos(std::in_place);  // whose holder may run no Python, nor wait for another lock
  for (; i < count; ++i) {
    PrefetchLeaves(items, i, count);
    if (items[i] == Py_None) {
      continue;
    }
    if (!IsTensor(items[i])) {
      obstacle = "not_tensor";
      break;
    }
    const at::Tensor& tensor = TensorIn(items[i]);
    at::Tensor updated;
    abi::Resolution resolved;
    std::optional<abi::HeldArray> held = abi::HeldBy(tensor);
    if (!held.has_value()) {
      infos.reset();
      updated = abi::TensorToDonate(tensor);
      resolved = abi::Resolve(updated);
      obstacle = Obstacle(resolved);
      if (*obstacle != '\0') {
        break;
      }
      held = {&resolved.tensor, &resolved.buffer, updated.sizes()};
      infos.emplace();
    }
    if (const auto info = infos->Of(**held->buffer); info.has_value() && info->read_only) {
      obstacle = "read_only";
      break;
    }
    if (abi::HasAliases(tensor)) {
      viewed.push_back(tensor);
    }
    donors->Add(*held->buffer, held->sizes,
                {*held->tensor, site, static_cast<std::uint32_t>(i), outputs.empty() ? nullptr : outputs[i],
                 abi::ShardingOf(**held->tensor)});
  }
  infos.reset();
  if (*obstacle != '\0') {
    return py::cast(LeafRefusal{i, obstacle, std::nullopt});
  }
  if (Watches(kEmpty) && !BlocksRuns()) {  // a trace may mark its arguments, which may be placeholders
    for (std::size_t number = 0; number < donors->Size(); ++number) {
      ThrowIfPlaceholder((*donors)[number].array.key);
    }
  }
  Commit(donors, site, viewed);
  made.call.site = site;
  made.call.donors = donors;
  return std::move(made.object);
}

py::object MarkArguments(const py::list& donated, const py::list& kept, const std::string& where, int strict,
                         bool for_compiled_run, py::object names) {
  RunDeferredDecrefs();
  PythonCall<Call> made;
  PyObject** items = PySequence_Fast_ITEMS(donated.ptr());
  std::vector<ArgumentToMark> resolved;
  std::vector<std::uint32_t> constants;
  ska::flat_hash_map<const abi::TensorData*, std::size_t> by_tensor;  // of aliases, which share the tensor's data
  resolved.reserve(donated.size());
  by_tensor.reserve(donated.size());
  for (std::size_t i = 0; i < donated.size(); ++i) {
    if (!IsTensor(items[i])) {
      continue;
    }
    const at::Tensor& tensor = TensorIn(items[i]);
    abi::Resolution leaf = abi::Resolve(tensor);
    const char* obstacle = leaf.state == abi::TensorState::kReadOnly ? "" : Obstacle(leaf);
    if (*obstacle != '\0') {
      return py::cast(LeafRefusal{i, obstacle, std::nullopt});
    }
    if (leaf.state == abi::TensorState::kReadOnly) {
      constants.push_back(static_cast<std::uint32_t>(i));
    } else {
      by_tensor.emplace(leaf.tensor.get(), i);
    }
    resolved.push_back({std::move(leaf.tensor), std::move(leaf.buffer), tensor.sizes(), static_cast<std::uint32_t>(i),
                        abi::HasAliases(tensor)});
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (PyObject* item = PyList_GET_ITEM(kept.ptr(), static_cast<py::ssize_t>(i)); IsTensor(item)) {
      const auto found = by_tensor.find(abi::Resolve(TensorIn(item)).tensor.get());
      if (found != by_tensor.end()) {
        return py::cast(LeafRefusal{found->second, "also_kept", i});
      }
    }
  }
  Call marked = MarkForCall(resolved, items, MakeCallSite(where, strict, std::move(names), for_compiled_run));
  marked.constants = std::move(constants);
  // An argument that is a view keeps its value. It could not be computed again from a base that the call consumes.
  for (const py::list* arguments : {&donated, &kept}) {
    for (const py::handle argument : *arguments) {
      if (IsTensor(argument.ptr())) {
        abi::KeepValue(TensorIn(argument.ptr()));
      }
    }
  }
  made.call = std::move(marked);
  return std::move(made.object);
}

// The C++ object of a torch._C._autograd.SavedTensor. A cast fails with torch 2.8, whose pybind11 state is not that of
// torch_xla, which we share. The layout of the Python object is that of torch's own headers in both.
const torch::autograd::SavedVariable& SavedBy(py::handle saved) {
  const auto* instance = reinterpret_cast<const py::detail::instance*>(saved.ptr());
  const std::string kind = Py_TYPE(saved.ptr())->tp_name;
  if (kind != "torch._C._autograd.SavedTensor" || !instance->simple_layout ||
      instance->simple_value_holder[0] == nullptr) {
    throw py::type_error("expected a torch._C._autograd.SavedTensor, got " + kind);
  }
  return *static_cast<const torch::autograd::SavedVariable*>(instance->simple_value_holder[0]);
}

// The buffer whose mark is the tensor's. For a consumed one nothing is computed, which would raise.
lazy::BackendDataPtr MarkedBuffer(const at::Tensor& tensor) {
  lazy::BackendDataPtr behind = abi::BufferBehind(tensor);
  const bool is_consumed = behind != nullptr && Steps::Get().IsConsumed(behind.get());
  return is_consumed ? behind : abi::BufferToDonate(tensor);
}

// Cancels the marks of the buffers that the outputs hold.
void KeepReturned(const py::list& outputs) {
  std::vector<lazy::BackendDataPtr> buffers;
  for (py::handle item : outputs) {
    if (IsTensor(item.ptr())) {
      if (abi::Resolution output = abi::Resolve(TensorIn(item.ptr())); output.buffer != nullptr) {
        buffers.push_back(std::move(output.buffer));
      }
    }
  }
  if (!buffers.empty()) {
    Marks::Get().Cancel(buffers);
  }
}

}  // namespace

std::shared_ptr<CallSite> MakeCallSite(const std::string& where, int strict, py::object names, bool for_compiled_run) {
  auto site = std::make_shared<CallSite>();
  site->where = where;
  site->strict = static_cast<Strictness>(strict);
  site->for_compiled_run = for_compiled_run;
  site->names = Share(std::move(names));
  return site;
}

Call MarkForCall(const std::vector<ArgumentToMark>& leaves, PyObject** items, std::shared_ptr<CallSite> site) {
  if (!leaves.empty()) {
    ThreadStep::Get().last_device = leaves.front().buffer->device();
  }
  Call call(std::move(site));
  call.is_scope = true;
  call.donors = std::make_shared<CallDonors>(leaves.size());
  std::vector<at::Tensor> viewed;
  for (const ArgumentToMark& leaf : leaves) {
    call.donors->Add(leaf.buffer, leaf.sizes, {leaf.tensor, call.site, leaf.index, {}, abi::ShardingOf(*leaf.tensor)});
    if (leaf.has_aliases) {
      viewed.push_back(TensorIn(items[leaf.index]));
    }
  }
  Steps::Get().BeginCall(call.site);
  Commit(call.donors, call.site, viewed);
  return call;
}

void BindMarks(py::module_& m) {
  py::class_<LeafRefusal>(m, "Refusal", "Why a call has marked nothing.")
      .def_readonly("leaf", &LeafRefusal::leaf, "Position of the first leaf that cannot be marked.")
      .def_readonly("obstacle", &LeafRefusal::obstacle, "As state names it, or 'not_tensor' or 'also_kept'.")
      .def_readonly("kept", &LeafRefusal::kept,
                    "For 'also_kept': position of the leaf of kept that holds the same buffer.");
  py::class_<Call>(m, "Call",
                   "The marks of one call of mark or mark_arguments. As a context it cancels the pending marks of the "
                   "buffers that mark was given, even those of another call, if its block raises.")
      .def("__enter__", [](py::object call) { return call; })
      .def("__exit__",
           [](const Call& call, py::handle kind, py::handle, py::handle) {
             if (!kind.is_none()) {
               Marks::Get().Cancel(*call.donors);
             }
           })
      .def_readonly("constants", &Call::constants, "Positions of leaves that are cached constants of torch_xla.");
  m.def(
      "is_ready",
      [](const py::tuple& names) {
        const auto is_set = [](py::handle name) {
          const char* text = PyUnicode_AsUTF8(name.ptr());
          // NOLINTNEXTLINE(concurrency-mt-unsafe): Python changes the environment with the GIL
          return text == nullptr ? throw py::error_already_set() : std::getenv(text) != nullptr;
        };
        return HooksInstalled() && SwitchedOffReason().empty() && !Steps::Get().HasNotices() &&
               std::none_of(names.begin(), names.end(), is_set);
      },
      py::arg("names"),
      "Whether the hooks are in place, set_switched_off has named no setting, take_notices would return no step, and "
      "none of these environment variables is set.");
  m.def("mark", &MarkLeaves, py::arg("leaves"), py::arg("where"), py::arg("strict"), py::arg("names"),
        py::arg("preferred_outputs"),
        "Marks a list or tuple of tensors (None is skipped), all or none; preferred_outputs maps positions to the "
        "tensors that should take the buffers. Returns the call, or the refusal of the first leaf that cannot be "
        "marked. strict: 0, 1 or 2, as in _config.Strictness. Raises DonatedBufferError for a leaf that "
        "was donated before.");
  m.def("mark_arguments", &MarkArguments, py::arg("donated"), py::arg("kept"), py::arg("where"), py::arg("strict"),
        py::arg("for_compiled_run"), py::arg("names"),
        "Marks the tensors among a call's donated leaves, all or none; skips other leaves. With for_compiled_run the "
        "marks are only for arm_run, and steps ignore them. Returns the call, or the refusal of the first leaf that "
        "cannot be marked, or whose buffer a leaf of kept also holds. Cached constants are marked; the step refuses "
        "them with a reason.");
  m.def(
      "cancel",
      [](const py::sequence& leaves) {
        std::vector<lazy::BackendDataPtr> buffers;
        std::vector<std::size_t> positions;
        std::size_t position = 0;
        for (py::handle leaf : leaves) {
          lazy::BackendDataPtr buffer = MarkedBuffer(TensorOf(leaf));
          if (buffer != nullptr) {
            buffers.push_back(std::move(buffer));
            positions.push_back(position);
          }
          ++position;
        }
        const auto taken = Steps::Get().Cancel(buffers);
        return taken.has_value() ? std::optional(positions[*taken]) : std::nullopt;
      },
      py::arg("leaves"),
      "Cancels the pending marks of the tensors' buffers, all or none. Returns the position of the first tensor whose "
      "buffer a step has consumed or a call of a compiled function is about to consume, and cancels none then; else "
      "None.");
  m.def(
      "cancel_call", [](const Call& call) { Steps::Get().CancelCall(call.site.get()); }, py::arg("call"),
      "Cancels the pending marks of a call.");
  m.def(
      "end_call",
      [](const Call& call, const std::unordered_map<std::uint32_t, Reason>& reasons, const Reason& reason,
         bool notify) { Steps::Get().EndCall(call.site.get(), reasons, reason, notify); },
      py::arg("call"), py::arg("reasons"), py::arg("reason"), py::arg("notify"),
      "Ends the pending marks of a call as unusable, for the reason of the leaf's position or the general one.");
  m.def("keep_returned", &KeepReturned, py::arg("outputs"),
        "Cancels the marks of buffers that these leaves hold, because a function that returns its argument keeps it.");
  m.def(
      "state",
      [](py::handle tensor) -> std::string {
        if (const auto buffer = MarkedBuffer(TensorOf(tensor)); buffer != nullptr) {
          if (Steps::Get().IsConsumed(buffer.get())) {
            return "donated";
          }
          if (Marks::Get().IsPending(buffer.get())) {
            return "marked";
          }
        }
        const char* obstacle = Obstacle(abi::Resolve(TensorOf(tensor)));
        return *obstacle != '\0' ? obstacle : "materialized";
      },
      py::arg("tensor"),
      "'donated', 'marked', 'materialized', 'pending', 'read_only', 'viewed', 'dynamic' or 'not_xla'. Never waits.");
  m.def(
      "is_constant",
      [](py::handle tensor) {
        const lazy::BackendDataPtr buffer = abi::BufferOfValue(TensorOf(tensor));
        const std::optional<abi::DeviceDataInfo> info = buffer == nullptr ? std::nullopt : abi::InfoOf(*buffer);
        return info.has_value() && info->read_only;
      },
      py::arg("tensor"),
      "Whether torch_xla shares the buffer with other tensors, also if a compiled function has marked it. Computes "
      "nothing, so the tensor may be a view of a consumed one.");
  m.def(
      "is_donated",
      [](py::handle tensor) {
        const lazy::BackendDataPtr buffer = abi::BufferBehind(TensorOf(tensor));
        return buffer != nullptr && Steps::Get().IsConsumed(buffer.get());
      },
      py::arg("tensor"),
      "Whether a step has consumed the buffer that a tensor holds or is computed from. Never waits.");
  m.def(
      "has_value",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        return resolved.buffer != nullptr && resolved.buffer->HasValue();
      },
      py::arg("tensor"), "Whether the device has computed the tensor's buffer and still has it.");
  m.def(
      "identity",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        return std::make_pair(reinterpret_cast<std::uintptr_t>(resolved.tensor.get()),
                              reinterpret_cast<std::uintptr_t>(resolved.buffer.get()));
      },
      py::arg("tensor"),
      "Two numbers that identify the data that a tensor shares with its aliases, and its buffer; 0 for none.");
  m.def(
      "give_array",
      [](py::handle pending, py::handle source) {
        const abi::Resolution to = abi::Resolve(TensorOf(pending)), from = abi::Resolve(TensorOf(source));
        if (to.tensor == nullptr || from.buffer == nullptr) {
          throw py::value_error("give_array needs a pending and a materialised XLA tensor");
        }
        to.tensor->ir_value = lazy::Value();
        abi::GiveArray(*to.tensor, from.buffer);
      },
      py::arg("pending"), py::arg("source"),
      "Replaces the work that would compute a tensor by the array of another one. The tensor keeps its sharding.");
  m.def(
      "drop_node",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        if (resolved.buffer == nullptr || !resolved.tensor->ir_value) {
          return false;
        }
        resolved.tensor->handle = resolved.buffer;
        resolved.tensor->ir_value = lazy::Value();
        return true;
      },
      py::arg("tensor"),
      "Drops the node by which graphs read a tensor's array, until the next read. Returns whether there was one.");
  py::class_<lazy::Value>(m, "Node", py::module_local(),  // torch_xla has a class of its own for them
                          "The node by which graphs read a tensor's array, if one has read it.")
      .def(py::init([](py::handle tensor) {
             const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
             return resolved.buffer == nullptr ? lazy::Value() : resolved.tensor->ir_value;
           }),
           py::arg("tensor"));
  m.def("read_otherwise", &ReadOtherwise, py::arg("results"), py::arg("nodes"),
        "The index of the first of these nodes whose array the results read by another node, too; None if there is "
        "none.");
  m.def(
      "note_placeholder", [](py::handle tensor) { NotePlaceholder(abi::Resolve(TensorOf(tensor)).buffer); },
      py::arg("tensor"), "A step that reads this tensor's array raises RuntimeError before it begins.");
  m.def(
      "holds",
      [](py::handle tensor) { return reinterpret_cast<std::uintptr_t>(abi::BufferOfValue(TensorOf(tensor)).get()); },
      py::arg("tensor"), "The buffer that a tensor holds (as in identity), without applying pending updates; or 0.");
  m.def(
      "base_holds",
      [](py::handle tensor) { return reinterpret_cast<std::uintptr_t>(abi::BaseBuffer(TensorOf(tensor)).get()); },
      py::arg("tensor"),
      "The same for a tensor's base, which lives as long as its views. A tensor that is no view is its own base.");
  m.def(
      "has_unpack_hook", [](py::handle saved) { return SavedBy(saved).has_hooks(); }, py::arg("saved"),
      "Whether reading a tensor that autograd has saved (torch._C._autograd.SavedTensor) calls code.");
  m.def(
      "has_graph",
      [](py::handle tensor) {
        const abi::Resolution resolved = abi::Resolve(TensorOf(tensor));
        return resolved.tensor != nullptr && resolved.buffer == nullptr && bool(resolved.tensor->ir_value);
      },
      py::arg("tensor"), "Whether the tensor is the result of operations that have not run.");
  m.def(
      "updated_in_place", [](py::handle tensor) { return UpdatedInPlace(TensorOf(tensor)); }, py::arg("tensor"),
      "Whether pending work replaces the tensor's value and reads the buffer that it had before.");
}

}  // namespace torch_xla_donate
