// Runs of compiled graphs: their donors, the order of their parameters, and their arguments.
#include <c10/util/flat_hash_map.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "features/compiled_run.h"
#include "features/executables.h"
#include "features/run_guard.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "python/bind.h"
#include "python/call.h"
#include "python/pytree.h"
#include "python/replay.h"
#include "registry/marks.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

std::vector<std::uint32_t> PerhapsShared(const CallSite& call) {
  const Marks& marks = Marks::Get();
  if (marks.PerhapsShared(&call, /*most=*/1).empty()) {
    return {};
  }
  if (const auto device = ThreadStep::Get().last_device) {  // of the call's marks
    py::gil_scoped_release released;
    abi::WaitForHandOver(*device);
  }
  // With the GIL, as another thread's is_donated() would count for a moment.
  return marks.PerhapsShared(&call, std::numeric_limits<std::size_t>::max());
}

void BindRuns(py::module_& m) {
  py::class_<abi::CompiledGraph>(m, "CompiledGraph", "A compiled graph as XLA describes it.")
      .def_readonly("text", &abi::CompiledGraph::text, "Its optimised HLO.")
      .def_readonly("memory", &abi::CompiledGraph::memory, "Its memory statistics.");
  py::class_<Signature>(m, "Signature", "The properties of inputs that a compiled graph depends on.")
      .def_readonly("key", &Signature::key, "Bytes that differ if the graphs traced for the tensors differ.")
      .def_readonly("devices", &Signature::devices, "As devices() of the tensors.")
      .def_readonly("pending", &Signature::pending, "Whether a tensor has no value yet.")
      .def_readonly("dynamic", &Signature::dynamic, "Whether only the device knows the size of a tensor.")
      .def_readonly("distinct", &Signature::distinct, "Whether each is an XLA tensor with a buffer of its own.")
      .def_readonly(
          "others", &Signature::others,
          "The leaves that are not tensors, and the classes of those that are of neither of torch's, in their order.")
      .def_readonly("hooks", &Signature::hooks, "The gradient hooks of the tensors.");
  py::class_<Replay::Begun, Call>(m, "Begun", "A call that has marked its donated leaves and armed its run.")
      .def_readonly("leaves", &Replay::Begun::leaves, "The leaves of the arguments.")
      .def_readonly("armed", &Replay::Begun::armed, "False if another thread has cancelled a mark meanwhile.");
  py::class_<Replay>(m, "Replay", "A call of a traced function, for calls whose arguments are like its own.")
      .def(py::init<py::list, Signature, std::vector<Replay::Donated>, std::string, py::object>(),
           py::arg("structures"), py::arg("signature"), py::arg("donated"), py::arg("graph"), py::arg("names"),
           "structures: as flatten returns them, for each argument. signature: of all leaves; it is distinct. donated: "
           "for each donated leaf its number, that of "
           "its parameter, and that of the output computed from it. graph, names: as in arm_run and mark_arguments.")
      .def("begin", &Replay::Begin, py::arg("arguments"), py::arg("where"), py::arg("strict"),
           "The call, begun. None, with nothing marked, unless the arguments are like those of the earlier call and "
           "nothing else may hold a donated buffer.");
  m.def(
      "perhaps_shared", [](const Call& call) { return PerhapsShared(*call.site); }, py::arg("call"),
      "Positions of a call's leaves whose buffers may have another holder or a pending reader. May have too many, "
      "never too few.");
  m.def(
      "marked_by",
      [](const Call& call, const py::sequence& arguments) {
        std::vector<std::pair<std::size_t, std::uint32_t>> result;
        std::size_t position = 0;
        for (py::handle argument : arguments) {
          if (IsTensor(argument.ptr())) {
            const abi::Resolution resolved = abi::Resolve(TensorIn(argument.ptr()));
            if (const auto leaf = Marks::Get().LeafOf(resolved.buffer.get(), call.site.get())) {
              result.emplace_back(position, *leaf);
            }
          }
          ++position;
        }
        return result;
      },
      py::arg("call"), py::arg("arguments"),
      "The arguments that hold buffers marked by the call: (position, position among the call's leaves).");
  m.def(
      "arm_run",
      [](const Call& call, const py::sequence& donors, const std::string& graph,
         const std::vector<std::pair<std::optional<std::size_t>, std::optional<std::size_t>>>& places, bool consumes) {
        std::vector<const lazy::BackendData*> buffers;
        std::vector<Steps::Offer> offers;
        buffers.reserve(donors.size());
        ska::flat_hash_set<const lazy::BackendData*> known;
        known.reserve(donors.size());
        for (std::size_t i = 0; i < donors.size(); ++i) {
          const lazy::BackendData* buffer = abi::Resolve(TensorOf(donors[i])).buffer.get();
          if (known.insert(buffer).second) {
            buffers.push_back(buffer);
            offers.push_back({nullptr, places.at(i).first, places.at(i).second});
          }
        }
        return DonateToNextRun(call.site.get(), buffers, std::move(offers), graph, consumes);
      },
      py::arg("call"), py::arg("donors"), py::arg("graph"), py::arg("places"), py::arg("consumes"),
      "This thread's next run of a compiled graph consumes the buffers of these tensors, which the call has marked. "
      "places has for each the number of its parameter, and of the output computed from it, if known. Without "
      "consumes the graph keeps the buffers, because donation is disabled, and the run only notes them. Returns False, "
      "and does nothing, if another thread has cancelled one of the marks.");
  m.def("disarm_run", &DisarmRun, "Ends arm_run, whether or not the graph has run.");
  m.def("expect_run", &ExpectRun,
        "The donors of this thread's next run were refused before it, so it does not count as a step without donors.");
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
      "Until take_order, this thread orders the parameters of each graph that it hashes or compiles. With that order "
      "XLA gives each of these donors to the output computed from it.");
  m.def(
      "take_order", &TakeOrder,
      "Ends order_parameters. Returns for each parameter of the last graph, in its order, the buffer (as in identity), "
      "and for a donor the number of the output computed from it.");
  py::class_<GraphRecord, std::shared_ptr<GraphRecord>>(
      m, "GraphRecord",
      "The graphs that a thread runs while the record is open, without those of reads. With stops_runs "
      "such a run raises RuntimeError in place of running.")
      .def(py::init<bool>(), py::arg("stops_runs") = false)
      .def("open", &GraphRecord::Open)
      .def("close", &GraphRecord::Close, "Keeps the graphs. Called on the thread that opened it.")
      .def("take", &GraphRecord::Take, "The graphs that were not returned before, in the order of their first run.");
  m.def("refuse_runs", &BlockRuns, py::arg("on"),
        "Whether running a graph on this thread raises RuntimeError, 'Unexpected execution ...'.");
  m.def("refuses_runs", &BlocksRuns, "The value that refuse_runs has set on this thread.");
  m.def("refuse_reads", &BlockReads, py::arg("on"),
        "Whether a read of a value on this thread raises the same error. refuse_runs ends it. Returns the value "
        "before.");
  m.def("runs_begun", &RunsBegun, "How many graphs this thread has begun to run.");
  m.def("barriers_passed", &BarriersPassed,
        "How often this thread has waited for a device while its runs were refused, as for a read or a step.");
  m.def("flatten", &Flatten, py::arg("tree"), py::arg("exact") = py::none(),
        "Leaves and structure of dicts, lists and tuples, in the order of torch's pytrees; None if the tree has "
        "anything else, contains itself or is more than 100 containers deep. exact(keys) stands for the keys of a dict "
        "if `==` may not distinguish them from others.");
  m.def("unflatten", &Unflatten, py::arg("leaves"), py::arg("tokens"),
        "The tree of a structure that flatten returned without exact, with other leaves.");
  m.def("signature", &SignatureOf, py::arg("leaves"),
        "The properties of these inputs that a compiled graph depends on.");
  m.def("devices", &DevicesOf, py::arg("leaves"),
        "The indices of the XLA devices of the tensors among these leaves, each once.");
}

}  // namespace torch_xla_donate
