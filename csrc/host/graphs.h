// The executor, its graphs and runs, devices and device data; and the checks of all layouts.
//
// Ownership: owns host objects only through the shared_ptr it returns.
// Threads: any thread may call all functions, with or without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "host/symbols.h"
#include "host/tensors.h"

namespace torch_xla_donate::abi {

// A copy of the executor's note on device data; nullopt if there is no note, or one of another class. `read_only`:
// torch_xla shares the data between tensors.
std::optional<DeviceDataInfo> InfoOf(const lazy::BackendData& buffer);

// The notes of many buffers, read or replaced under one lock. While it lives, no other thread replaces a note.
class InfosLocked {
 public:
  InfosLocked();
  // As InfoOf().
  static std::optional<DeviceDataInfo> Of(const lazy::BackendData& buffer);

 private:
  std::unique_lock<std::mutex> lock_;
};

// The live tensors of a device whose numbers are higher than `after`, in the order of the numbers. `arena` is the
// executor's.
std::vector<std::shared_ptr<TensorData>> TensorsOf(void* arena, const lazy::BackendDevice& device,
                                                   std::int64_t after = 0);

// The pending graph of the device's random seed; empty before the first random number since the last MarkStep.
lazy::Value SeedOf(void* arena, const lazy::BackendDevice& device);

// Whether torch keeps nodes, with the buffers they read, for later graphs (torch_lazy_reuse_ir).
bool KeepsNodes();

// Waits until every run that is starting on the device has been passed to it and has released its buffers. The caller
// must not hold the GIL. Throws the error of an earlier failed step, as torch_xla does when it waits.
void WaitForHandOver(const lazy::BackendDevice& device);

// The device as Python knows it, such as xla:0. Throws std::runtime_error if this process does not have it.
at::Device TorchDevice(const lazy::BackendDevice& device);

// Whether a device stands for all devices of an SPMD program.
bool IsSpmd(const lazy::BackendDevice& device);

// Shape, layout and sharding of device data as XLA writes them, for example "f32[8,4]{1,0}", followed by "
// sharding={...}" if sharded. Empty if the host's text cannot be parsed.
std::string DescribeBuffer(const lazy::BackendData& buffer);

// The array of a node's output, without layout and sharding: "f32[8,4]". Empty if the host's text cannot be parsed.
std::string DescribeNode(const lazy::Value& value);

// A compiled graph as XLA describes it: the optimised HLO module, and the bytes that a run takes.
struct CompiledGraph {
  std::string text;
  std::string memory;
};
// The number of graphs that torch_xla has compiled in this process, until the program clears torch_xla's counters.
std::uint64_t Compilations();

// The executable of a prepared run. Throws std::runtime_error if the objects are not of the expected classes.
struct HostCachedComputation;
std::shared_ptr<const HostCachedComputation> ExecutableOf(const Executor::Async& run);
CompiledGraph DescribeGraph(const HostCachedComputation& executable);

// Compares the layouts of this folder with a fresh, uploaded int32[3] probe and torch_xla's id of it. Must pass before
// any other function of this folder is used. Throws std::runtime_error that names the first difference.
void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id, bool is_sharded);

}  // namespace torch_xla_donate::abi
