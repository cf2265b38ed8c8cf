// Reads torch_xla's executor, its runs and its device data.
#include "host/graphs.h"

#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/config.h>
#include <torch/csrc/lazy/core/metrics.h>

#include <cstring>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "host/layouts.h"

namespace torch_xla_donate::abi {

const DeviceDataInfo* InfoOf(const lazy::BackendData& buffer) {
  const lazy::BackendData::Info* info = buffer.info();
  // No class derives from it, so this exact comparison works and costs a fraction of a dynamic_cast.
  return info != nullptr && typeid(*info) == typeid(DeviceDataInfo) ? static_cast<const DeviceDataInfo*>(info)
                                                                    : nullptr;
}

void WaitForHandOver(const lazy::BackendDevice& device) {
  Executor::SyncTensorCollection nothing;
  nothing.device = device;
  // Takes the device's lock. The thread that starts a run holds it until the run has started.
  static_cast<Executor*>(lazy::LazyGraphExecutor::Get())->PassBarrier(&nothing);
}

std::optional<std::size_t> OutputIds::ReplacementOf(const lazy::BackendData& buffer) const {
  const DeviceDataInfo* info = InfoOf(buffer);
  const auto found = info == nullptr || info->read_only ? place_of_.end() : place_of_.find(info->tensor_id);
  return found == place_of_.end() ? std::nullopt : std::optional(found->second);
}

at::Device TorchDevice(const lazy::BackendDevice& device) {
  // Only the ordinal counts, as for torch_xla's tokens. The device of an SPMD program is xla:0, too.
  const std::vector<lazy::BackendDevice> devices = lazy::getBackend()->GetBackendDevices();
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].ordinal() == device.ordinal()) {
      return at::Device(at::kXLA, static_cast<at::DeviceIndex>(i));
    }
  }
  throw std::runtime_error("torch_xla does not list the device " + device.toString());
}

bool IsSpmd(const lazy::BackendDevice& device) { return device.toString().rfind("SPMD", 0) == 0; }

std::vector<std::shared_ptr<TensorData>> TensorsSince(void* arena, const lazy::BackendDevice& device, std::int64_t id) {
  struct Arena : Executor::DeviceContextArena {
    using DeviceContextArena::DeviceContext;
    using DeviceContextArena::ForAllDeviceContexts;
  };
  std::vector<std::shared_ptr<TensorData>> result;
  // Calls torch's own function, even while hooks are installed.
  static_cast<Arena*>(arena)->ForAllDeviceContexts(
      [&result, id](Arena::DeviceContext* context) {
        const std::lock_guard<std::mutex> lock(context->lock);
        for (auto it = context->tensors_data.upper_bound(id); it != context->tensors_data.end(); ++it) {
          if (std::shared_ptr<TensorData> data = it->second.lock()) {
            result.push_back(std::move(data));
          }
        }
      },
      &device);
  return result;
}

bool KeepsNodes() { return FLAGS_torch_lazy_reuse_ir; }

bool InEagerMode(const lazy::LazyGraphExecutor& executor) {
  return typeid(executor) != typeid(lazy::LazyGraphExecutor) &&
         static_cast<const HostExecutor&>(executor).use_eager_mode;
}

std::string DescribeBuffer(const lazy::BackendData& buffer) {
  const std::string text = static_cast<const HostBuffer&>(buffer).ToString();
  const auto field = [&text](const char* label) -> std::string {
    const std::size_t begin = text.find(label);
    if (begin == std::string::npos) {
      return {};
    }
    const std::size_t value = begin + std::strlen(label);
    return text.substr(value, text.find('\n', value) - value);
  };
  const std::string sharding = field("OpSharding: ");
  return field("Data Shape: ") + (sharding.empty() ? "" : " sharding=" + sharding);
}

std::string DescribeNode(const lazy::Value& value) {
  // "xla_shape=f32[8,4]{1,0}", or "xla_shape=(f32[8,4]{1,0}, s32[])" for a node with several outputs.
  const std::string text = value.node->ToString();
  std::size_t open = text.find("xla_shape=");
  for (std::size_t i = 0; i <= value.index && open != std::string::npos; ++i) {
    open = text.find('[', open + 1);
  }
  const std::size_t close = text.find(']', open);
  if (open == std::string::npos || close == std::string::npos) {
    return std::string();
  }
  const std::size_t begin = text.find_last_of("=( ", open) + 1;
  return text.substr(begin, close + 1 - begin);
}

bool IsAnnotated(const lazy::Node& node) { return node.hash() != node.shapeHash(); }

std::shared_ptr<const HostCachedComputation> ExecutableOf(const Executor::Async& run) {
  if (std::strcmp(typeid(run).name(), kAsyncType) != 0) {
    Mismatch(std::string("a run is a ") + typeid(run).name() + ", expected " + kAsyncType);
  }
  const auto& cached = static_cast<const HostAsync&>(run).cached_computation;
  const lazy::Computation* computation = cached == nullptr ? nullptr : cached->computation.get();
  if (computation == nullptr || std::strcmp(typeid(*computation).name(), kComputationType) != 0) {
    Mismatch(std::string("a run's graph is ") + (computation == nullptr ? "missing" : typeid(*computation).name()) +
             ", expected " + kComputationType);
  }
  return cached;
}

std::uint64_t Compilations() {
  lazy::CounterData* counter = lazy::GetCounter("UncachedCompile");
  return counter == nullptr ? 0 : static_cast<std::uint64_t>(counter->Value());
}

CompiledGraph DescribeGraph(const HostCachedComputation& executable) {
  return {executable.computation->to_string(), executable.computation->get_memory_info()};
}

}  // namespace torch_xla_donate::abi
