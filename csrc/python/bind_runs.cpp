// Runs of compiled graphs: their donors, their order, and the arguments they are called with.
#include <c10/util/flat_hash_map.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "features/compiled_run.h"
#include "features/run_guard.h"
#include "features/run_probe.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "python/bind.h"
#include "python/call.h"
#include "python/pytree.h"
#include "registry/registry.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

void BindRuns(py::module_& m) {
  py::class_<abi::CompiledGraph>(m, "CompiledGraph", "What XLA says of a graph that it has compiled.")
      .def_readonly("text", &abi::CompiledGraph::text, "Its optimised HLO.")
      .def_readonly("memory", &abi::CompiledGraph::memory, "Its memory statistics.");
  py::class_<Signature>(m, "Signature", "What a graph is compiled for, of its inputs.")
      .def_readonly("key", &Signature::key, "Bytes that differ if a graph traced for these tensors does.")
      .def_readonly("pending", &Signature::pending, "Whether a tensor has no value yet.")
      .def_readonly("dynamic", &Signature::dynamic, "Whether only the device knows the size of one.")
      .def_readonly("others", &Signature::others, "What is not a tensor.");
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
  m.def("disarm_run", &DisarmRun, "Ends arm_run, whether the graph has run or not.");
  m.def("expect_run", &ExpectRun,
        "Donors have been refused before the run on this thread that would have read them: it is not a step without.");
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
  m.def("take_inspected", &TakeInspected,
        "The graph of the run that inspect_next_run has stopped; None if there was none.");
  m.def("refuse_runs", &BlockRuns, py::arg("on"),
        "Whether graphs that this thread is about to run are refused: RuntimeError, 'Unexpected execution ...'.");
  m.def("runs_begun", &RunsBegun, "How many graphs this thread has begun to run.");
  m.def("barriers_passed", &BarriersPassed,
        "How often this thread has waited for a device, as for a read or a step. Counted while runs are refused.");
  m.def("flatten", &Flatten, py::arg("tree"),
        "Leaves and structure (hashable) of dicts, lists and tuples, in the order of torch's pytrees; None for a tree "
        "with "
        "anything else in it.");
  m.def("unflatten", &Unflatten, py::arg("leaves"), py::arg("tokens"),
        "The tree of a structure that flatten gave, with other leaves.");
  m.def("signature", &SignatureOf, py::arg("leaves"), "What a graph of these inputs is compiled for.");
}

}  // namespace torch_xla_donate
