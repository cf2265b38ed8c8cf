// Reads torch_xla's executor, its runs and its device data.
#include "host/graphs.h"

#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/config.h>
#include <torch/csrc/lazy/core/metrics.h>

#include <atomic>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "host/layouts.h"
#include "host/object_check.h"
#include "host/process_mutex.h"

namespace torch_xla_donate::abi {

namespace {

struct Arena : Executor::DeviceContextArena {
  using DeviceContextArena::DeviceContext;
  using DeviceContextArena::ForAllDeviceContexts;
};

// Calls the function with the device's lock. Calls torch's own walk, even while hooks are installed.
template <typename Function>
void ForContextOf(void* arena, const lazy::BackendDevice& device, const Function& function) {
  static_cast<Arena*>(arena)->ForAllDeviceContexts(
      [&function](Arena::DeviceContext* context) {
        const std::lock_guard<std::mutex> lock(context->lock);
        function(*context);
      },
      &device);
}

}  // namespace

std::optional<DeviceDataInfo> InfoOf(const lazy::BackendData& buffer) {
  const InfosLocked infos;
  return infos.Of(buffer);
}

InfosLocked::InfosLocked() : lock_(ProcessMutex(MutexOf::kDataInfos)) {}

std::optional<DeviceDataInfo> InfosLocked::Of(const lazy::BackendData& buffer) {
  const lazy::BackendData::Info* info = buffer.info();
  // No class derives from it, so this exact comparison works and costs a fraction of a dynamic_cast.
  if (info == nullptr || typeid(*info) != typeid(DeviceDataInfo)) {
    return std::nullopt;
  }
  return *static_cast<const DeviceDataInfo*>(info);
}

void WaitForHandOver(const lazy::BackendDevice& device) {
  Executor::SyncTensorCollection nothing;
  nothing.device = device;
  // Takes the device's lock. The thread that starts a run holds it until the run has started.
  static_cast<Executor*>(lazy::LazyGraphExecutor::Get())->PassBarrier(&nothing);
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

std::vector<std::shared_ptr<TensorData>> TensorsOf(void* arena, const lazy::BackendDevice& device, std::int64_t after) {
  std::vector<std::shared_ptr<TensorData>> result;
  ForContextOf(arena, device, [&result, after](const Arena::DeviceContext& context) {
    const auto& all = context.tensors_data;
    const auto first = all.upper_bound(after);
    // The destructor of a tensor takes the lock, so the only allocation comes before this thread owns one.
    result.reserve(first == all.begin() ? all.size() : static_cast<std::size_t>(std::distance(first, all.end())));
    for (auto it = first; it != all.end(); ++it) {
      if (std::shared_ptr<TensorData> data = it->second.lock()) {
        result.push_back(std::move(data));
      }
    }
  });
  return result;
}

lazy::Value SeedOf(void* arena, const lazy::BackendDevice& device) {
  lazy::Value seed;
  ForContextOf(arena, device, [&seed](const Arena::DeviceContext& context) { seed = context.seed_ir_value; });
  return seed;
}

bool KeepsNodes() { return FLAGS_torch_lazy_reuse_ir; }

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

std::shared_ptr<const HostCachedComputation> ExecutableOf(const Executor::Async& run) {
  if (std::strcmp(typeid(run).name(), kAsyncType) != 0) {
    Mismatch(std::string("a run is a ") + typeid(run).name() + ", expected " + kAsyncType);
  }
  const auto& host = static_cast<const HostAsync&>(run);
  static std::atomic<bool> verified{false};
  if (!verified.load(std::memory_order_relaxed)) {
    const ObjectCheck check(typeid(run));
    check.Readable("a run", &host, sizeof host);
    check.Readable("the entry of a run's graph in the cache", host.cached_computation.get(),
                   sizeof(HostCachedComputation));
    const lazy::Computation* const graph = host.cached_computation->computation.get();
    check.Object("a run's graph", graph, sizeof(HostComputation), {kComputationType});
    check.Virtuals("a run's graph", graph, kComputationVirtuals);
    verified.store(true, std::memory_order_relaxed);
  }
  const auto& cached = host.cached_computation;
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
