// The executor, its graphs and runs, devices and device data.
//
// Ownership: nothing here owns host objects beyond the shared_ptr it returns.
// Threads: all functions may be called from any thread, with or without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/symbols.h"
#include "host/tensors.h"

namespace torch_xla_donate::abi {

// The executor's note on device data; null if there is none, or one of another kind.
const DeviceDataInfo* InfoOf(const lazy::BackendData& buffer);

// The live tensors of a device that were made after the one of this id; `arena` is the executor's own.
std::vector<std::shared_ptr<TensorData>> TensorsSince(void* arena, const lazy::BackendDevice& device, std::int64_t id);

// Whether nodes are kept for graphs to come (torch's torch_lazy_reuse_ir), with whatever they read.
bool KeepsNodes();

// Waits until whatever is being started on the device has been handed over to it, and its buffers let go. The caller
// must not hold the GIL. Passes on what made an earlier step fail, as torch_xla does where it waits for it.
void WaitForHandOver(const lazy::BackendDevice& device);

// Whether the switch of eager mode is on, of the executor that passes the hooks (torch's registered one is another).
bool InEagerMode(const lazy::LazyGraphExecutor& executor);

// The outputs of a step, by the ids that tell which inputs torch_xla donates to them by itself.
class OutputIds {
 public:
  // Of several with one id, which share a buffer, the first one counts.
  void Add(const TensorData& output) { place_of_.emplace(AliasId(output), added_++); }
  // The output that replaces the buffer, counted in the order of Add(); nothing if torch_xla does not donate it.
  std::optional<std::size_t> ReplacementOf(const lazy::BackendData& buffer) const;
  bool Empty() const { return place_of_.empty(); }
  // An id of an output, whichever; there must be one.
  std::int64_t Any() const { return place_of_.begin()->first; }

 private:
  std::unordered_map<std::int64_t, std::size_t> place_of_;
  std::size_t added_ = 0;
};

// The device as torch and torch_xla's Python functions know it, such as xla:0. Throws std::runtime_error if it is none
// of this process.
at::Device TorchDevice(const lazy::BackendDevice& device);

// Whether a device stands for all devices of an SPMD program.
bool IsSpmd(const lazy::BackendDevice& device);

// Shape, layout and sharding of device data as XLA writes them, for example "f32[8,4]{1,0}", and " sharding={...}"
// where there is one. Empty if the host's text is not understood.
std::string DescribeBuffer(const lazy::BackendData& buffer);

// The array that a node's output will be, without layout and sharding: "f32[8,4]". Empty if the host's text for it is
// not understood.
std::string DescribeNode(const lazy::Value& value);

// Whether somebody has given the node a sharding.
bool IsAnnotated(const lazy::Node& node);

// A compiled graph in XLA's words: the optimised HLO module, and the bytes that a run takes.
struct CompiledGraph {
  std::string text;
  std::string memory;
};
// The executable of a run that has been prepared. Throws std::runtime_error if the objects are not of the classes
// expected.
struct HostCachedComputation;
std::shared_ptr<const HostCachedComputation> ExecutableOf(const Executor::Async& run);
CompiledGraph DescribeGraph(const HostCachedComputation& executable);

}  // namespace torch_xla_donate::abi
