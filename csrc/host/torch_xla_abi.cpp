// Names, layouts and their check: the knowledge of torch_xla that torch_xla_abi.h promises to keep in one place.
#include "host/torch_xla_abi.h"

#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/config.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <typeinfo>
#include <utility>

namespace torch_xla_donate::abi {

// Imported under these names by the wheels of 2.7.0, 2.8.1 and 2.9.0.
const char* const kRunPostOrder =
    "_ZN5torch4lazy17LazyGraphExecutor12RunPostOrderERKSt6vectorINS0_5ValueESaIS3_EEPNS1_20SyncTensorCollectionE";
const char* const kAsyncConstructor =
    "_ZN5torch4lazy17LazyGraphExecutor5AsyncC2EPNS1_20SyncTensorCollectionESt6vectorISt10shared_ptrINS0_11BackendDataEE"
    "SaIS8_EESA_S6_INS1_17CachedComputationEE";
const char* const kLazyTensorConstructor = "_ZN5torch4lazy10LazyTensorC2ESt10shared_ptrINS1_4DataEE";
const char* const kCurrentDataHandle = "_ZNK5torch4lazy10LazyTensor17CurrentDataHandleEv";
const char* const kCreateTensorNode =
    "_ZNK5torch4lazy10LazyTensor16CreateTensorNodeERKSt10shared_ptrINS0_11BackendDataEEb";
const char* const kForAllDeviceContexts =
    "_ZN5torch4lazy17LazyGraphExecutor18DeviceContextArena20ForAllDeviceContextsERKSt8functionIFvPNS2_13DeviceContextEE"
    "EPKNS0_13BackendDeviceE";
const char* const kTensorCollectionBarrier =
    "_ZN5torch4lazy17LazyGraphExecutor23TensorCollectionBarrierEPNS1_20SyncTensorCollectionE";
const char* const kMarkStep = "_ZN5torch4lazy17LazyGraphExecutor18DeviceContextArena8MarkStepERKNS0_13BackendDeviceE";
const char* const kCompleter = "_ZN5torch4lazy9MultiWait9CompleterESt8functionIFvvEE";
const char* const kCommitUpdate = "_ZN2at23FunctionalTensorWrapper13commit_updateEv";
const char* const kViewConstructor[2] = {
    "_ZN2at23FunctionalTensorWrapperC1ERKNS_6TensorEPKS0_RKSt10shared_ptrINS_17functionalization8ViewMetaEE",
    "_ZN2at23FunctionalTensorWrapperC1ERKNS_6TensorEPKS0_RKNS_17functionalization8ViewMetaE"};
const char* const kCopyTensorMetadata =
    "_ZN2at23FunctionalTensorWrapper20copy_tensor_metadataEPKS0_PS0_RKN3c1015VariableVersionEb";
const char* const kMutateViewMeta[2] = {
    "_ZN2at23FunctionalTensorWrapper16mutate_view_metaERKSt10shared_ptrINS_17functionalization8ViewMetaEE",
    "_ZN2at23FunctionalTensorWrapper16mutate_view_metaERKNS_17functionalization8ViewMetaE"};

// torch_xla::runtime::ComputationClient::Computation: the first virtual function it adds.
struct HostComputation : lazy::Computation {
  virtual const std::string get_memory_info() const = 0;
};
struct HostCachedComputation {
  std::shared_ptr<HostComputation> computation;
  bool is_sharded;
};
// torch_xla::XLAGraphExecutor::Async: what it adds to torch's own part.
struct HostAsync : Executor::Async {
  std::shared_ptr<HostCachedComputation> cached_computation;
};

// torch_xla::runtime::ComputationClient::Data: the first virtual function it adds. Not in an unnamed namespace: there
// the compiler would conclude that nobody overrides it.
struct HostBuffer : lazy::BackendData {
  virtual std::string ToString() const = 0;
};

// torch_xla::XLAGraphExecutor: what it adds to torch's own part, up to what is needed here.
struct HostExecutor : lazy::LazyGraphExecutor {
  void* computation_cache;
  bool use_eager_mode;
  bool allow_execution;
  std::string current_graph_name;
};

namespace {

constexpr const char* kTensorImplType = "N9torch_xla13XLATensorImplE";
constexpr const char* kTensorDataType = "N9torch_xla9XLATensor4DataE";
constexpr const char* kAsyncType = "N9torch_xla16XLAGraphExecutor5AsyncE";
constexpr const char* kComputationType = "N9torch_xla7runtime21PjRtComputationClient15PjRtComputationE";

// torch_xla::XLATensor::Data: what it adds to torch's own part.
struct HostTensorData : TensorData {
  std::shared_ptr<void> view;
  std::optional<at::ScalarType> logical_element_type;
  std::shared_ptr<void> sharding;
  std::int64_t alias_id;
  bool is_cloned;
};

// torch_xla::XLATensor: the first that it adds is a pointer of its own type to the same data.
struct HostTensor : lazy::LazyTensor {
  std::shared_ptr<TensorData> data;
};

const HostTensorData& AsHost(const TensorData& data) { return static_cast<const HostTensorData&>(data); }

// The address of a type's name identifies it cheaply once the text has been compared.
bool HasType(const std::type_info& type, const char* name, std::atomic<const char*>& known) {
  const char* found = type.name();
  if (found == known.load(std::memory_order_relaxed)) {
    return true;
  }
  if (std::strcmp(found, name) != 0) {
    return false;
  }
  known.store(found, std::memory_order_relaxed);
  return true;
}

// torch_xla::XLATensorImpl: c10::TensorImpl, then the pointer to its lazy tensor.
const lazy::LazyTensorPtr* LazyTensorOf(const c10::TensorImpl& impl) {
  static std::atomic<const char*> known{nullptr};
  if (!HasType(typeid(impl), kTensorImplType, known)) {
    return nullptr;
  }
  return reinterpret_cast<const lazy::LazyTensorPtr*>(reinterpret_cast<const char*>(&impl) + sizeof(c10::TensorImpl));
}

[[noreturn]] void Mismatch(const std::string& what) { throw std::runtime_error(what); }

}  // namespace

const DeviceDataInfo* InfoOf(const lazy::BackendData& buffer) {
  const lazy::BackendData::Info* info = buffer.info();
  // Nobody derives from it, so the exact type will do; that is a fraction of a dynamic_cast.
  return info != nullptr && typeid(*info) == typeid(DeviceDataInfo) ? static_cast<const DeviceDataInfo*>(info)
                                                                    : nullptr;
}

lazy::BackendDataPtr BufferOf(const TensorData& tensor) {
  if (tensor.handle != nullptr || !tensor.ir_value) {
    return tensor.handle;
  }
  return lazy::getBackend()->GetComputationDataFromNode(tensor.ir_value.node.get());
}

void GiveArray(TensorData& tensor, lazy::BackendDataPtr array) {
  auto& host = static_cast<HostTensorData&>(tensor);
  host.handle = std::move(array);
  host.view = nullptr;
  host.tensor_data.reset();
  host.is_cloned = false;
}

void InvalidateViews(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  if (!functional::isFunctionalTensor(tensor)) {
    return;
  }
  const at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(tensor);
  const c10::Storage& storage = wrapper->storage();
  if (storage.use_count() == 1) {
    return;
  }
  // A tensor and its views have one storage. The base is replaced by itself, which makes the views out of date.
  auto& group = static_cast<at::functionalization::FunctionalStorageImpl&>(*storage.unsafeGetStorageImpl());
  const at::Tensor base = group.base();
  if (base.unsafeGetTensorImpl() == wrapper->value().unsafeGetTensorImpl()) {
    group.add_update(base, {});
  }
}

void WaitForHandOver(const lazy::BackendDevice& device) {
  Executor::SyncTensorCollection nothing;
  nothing.device = device;
  // Takes the device's lock, which whoever starts a run keeps until it is done with that.
  static_cast<Executor*>(lazy::LazyGraphExecutor::Get())->PassBarrier(&nothing);
}

bool HasView(const TensorData& tensor) { return AsHost(tensor).view != nullptr; }

const std::shared_ptr<void>& ShardingOf(const TensorData& tensor) { return AsHost(tensor).sharding; }

std::int64_t AliasId(const TensorData& tensor) { return AsHost(tensor).alias_id; }

std::optional<std::size_t> OutputIds::ReplacementOf(const lazy::BackendData& buffer) const {
  const DeviceDataInfo* info = InfoOf(buffer);
  const auto found = info == nullptr || info->read_only ? place_of_.end() : place_of_.find(info->tensor_id);
  return found == place_of_.end() ? std::nullopt : std::optional(found->second);
}

at::Device TorchDevice(const lazy::BackendDevice& device) {
  // By the ordinal alone, as torch_xla keeps its tokens: that of all devices of an SPMD program is xla:0, too.
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
  // Torch's own function, whatever hooks there are.
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

namespace {

// The counter that is_up_to_date() compares is private, and an explicit instantiation may name private members.
struct Generation {
  friend std::size_t& CounterOf(Generation, at::FunctionalTensorWrapper& tensor);
};
template <std::size_t at::FunctionalTensorWrapper::* member>
struct Open {
  friend std::size_t& CounterOf(Generation, at::FunctionalTensorWrapper& tensor) { return tensor.*member; }
};
template struct Open<&at::FunctionalTensorWrapper::generation_>;

// The same for what a storage has noted and not applied yet.
using Group = at::functionalization::FunctionalStorageImpl;
struct Noted {
  friend void DropLastWrite(Noted, Group& group);
};
template <auto updates, auto generation>
struct OpenNoted {
  friend void DropLastWrite(Noted, Group& group) {
    (group.*updates).pop_back();
    --(group.*generation);
  }
};
template struct OpenNoted<&Group::updates_, &Group::generation_>;

at::functionalization::FunctionalStorageImpl& GroupOf(const at::FunctionalTensorWrapper& tensor) {
  return static_cast<at::functionalization::FunctionalStorageImpl&>(*tensor.storage().unsafeGetStorageImpl());
}

lazy::BackendDataPtr BufferOfImpl(const c10::TensorImpl& impl) {
  const lazy::LazyTensorPtr* tensor = LazyTensorOf(impl);
  return tensor == nullptr || *tensor == nullptr ? nullptr : BufferOf(*(*tensor)->data());
}

}  // namespace

void SetUpToDate(at::FunctionalTensorWrapper& tensor) {
  CounterOf(Generation(), tensor) = GroupOf(tensor).generation();
}

void ApplyLastWrite(at::FunctionalTensorWrapper& written) {
  Group& group = GroupOf(written);
  try {
    group.apply_updates();
  } catch (...) {
    DropLastWrite(Noted(), group);
    CounterOf(Generation(), written) = group.generation() - 1;  // it holds what it should not have got
    throw;
  }
}

void KeepValue(const at::Tensor& tensor) {
  if (at::functionalization::impl::isFunctionalTensor(tensor)) {
    SetUpToDate(*at::functionalization::impl::unsafeGetFunctionalWrapper(tensor));
  }
}

lazy::BackendDataPtr BaseBuffer(const at::FunctionalTensorWrapper& tensor) {
  return BufferOfImpl(*GroupOf(tensor).base().unsafeGetTensorImpl());
}

lazy::BackendDataPtr ValueBuffer(const at::FunctionalTensorWrapper& tensor) {
  return BufferOfImpl(*tensor.value().unsafeGetTensorImpl());
}

const TensorData* ValueOf(const c10::TensorImpl& tensor) {
  const bool is_functional = tensor.key_set().has(c10::DispatchKey::Functionalize);
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(
      is_functional ? *static_cast<const at::FunctionalTensorWrapper&>(tensor).value().unsafeGetTensorImpl() : tensor);
  return lazy_tensor == nullptr || *lazy_tensor == nullptr ? nullptr : (*lazy_tensor)->data().get();
}

bool KeepsNodes() { return FLAGS_torch_lazy_reuse_ir; }

bool InEagerMode(const lazy::LazyGraphExecutor& executor) {
  return typeid(executor) != typeid(lazy::LazyGraphExecutor) &&
         static_cast<const HostExecutor&>(executor).use_eager_mode;
}

lazy::BackendDataPtr BufferBehind(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  if (functional::isFunctionalTensor(tensor)) {
    const at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(tensor);
    if (!wrapper->is_up_to_date()) {
      const c10::Storage& storage = wrapper->storage();
      auto& group = static_cast<at::functionalization::FunctionalStorageImpl&>(*storage.unsafeGetStorageImpl());
      const lazy::LazyTensorPtr* base = LazyTensorOf(*group.base().unsafeGetTensorImpl());
      return base == nullptr || *base == nullptr ? nullptr : BufferOf(*(*base)->data());
    }
  }
  return Resolve(tensor).buffer;
}

Resolution Resolve(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  Resolution result;
  if (functional::isFunctionalTensor(tensor)) {
    functional::sync(tensor);
    impl = functional::unsafeGetFunctionalWrapper(tensor)->value().unsafeGetTensorImpl();
  }
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(*impl);
  if (lazy_tensor == nullptr || *lazy_tensor == nullptr) {
    return result;
  }
  result.tensor = (*lazy_tensor)->data();
  if (HasView(*result.tensor)) {
    result.state = TensorState::kViewed;
    return result;
  }
  // A clone has its source's graph until a step gives it a buffer of its own.
  const bool is_clone = result.tensor->handle == nullptr && AsHost(*result.tensor).is_cloned;
  result.buffer = is_clone ? nullptr : BufferOf(*result.tensor);
  if (result.buffer == nullptr) {
    result.state = TensorState::kPending;
    return result;
  }
  const DeviceDataInfo* info = InfoOf(*result.buffer);
  result.state = info != nullptr && info->read_only   ? TensorState::kReadOnly
                 : impl->has_symbolic_sizes_strides() ? TensorState::kDynamic
                                                      : TensorState::kMaterialized;
  return result;
}

void Prefetch(const std::vector<const at::Tensor*>& tensors) {
  namespace functional = at::functionalization::impl;
  std::vector<const char*> next;
  next.reserve(tensors.size());
  for (const at::Tensor* tensor : tensors) {
    const c10::TensorImpl* impl = tensor->unsafeGetTensorImpl();
    if (functional::isFunctionalTensor(*tensor)) {
      const at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(*tensor);
      __builtin_prefetch(reinterpret_cast<const char*>(wrapper->storage().unsafeGetStorageImpl()) +
                         sizeof(c10::StorageImpl));
      impl = wrapper->value().unsafeGetTensorImpl();
    }
    next.push_back(reinterpret_cast<const char*>(impl));
    __builtin_prefetch(next.back());
    __builtin_prefetch(next.back() + sizeof(c10::TensorImpl));
  }
  std::vector<const lazy::LazyTensor*> lazy_tensors;
  lazy_tensors.reserve(next.size());
  for (const char* impl : next) {
    const lazy::LazyTensorPtr* found = LazyTensorOf(*reinterpret_cast<const c10::TensorImpl*>(impl));
    if (found != nullptr && *found != nullptr) {
      lazy_tensors.push_back(found->get());
      __builtin_prefetch(lazy_tensors.back());
    }
  }
  std::vector<const TensorData*> held;
  held.reserve(lazy_tensors.size());
  for (const lazy::LazyTensor* tensor : lazy_tensors) {
    held.push_back(tensor->data().get());
    for (std::size_t line = 0; line < sizeof(HostTensorData); line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(held.back()) + line);
    }
  }
  for (const TensorData* data : held) {
    __builtin_prefetch(data->handle.get());
  }
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
  // "xla_shape=f32[8,4]{1,0}", or "xla_shape=(f32[8,4]{1,0}, s32[])" for a node of several outputs.
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

std::optional<std::string> PendingArray(const TensorData& tensor) {
  if (tensor.handle != nullptr || !tensor.ir_value) {
    return std::nullopt;
  }
  const lazy::Node* node = tensor.ir_value.node.get();
  if (lazy::getBackend()->GetComputationDataFromNode(node) != nullptr && !AsHost(tensor).is_cloned) {
    return std::nullopt;
  }
  return DescribeNode(tensor.ir_value);
}

bool IsAnnotated(const lazy::Node& node) { return node.hash() != node.shapeHash(); }

StandIn::StandIn(const at::Tensor& tensor, std::shared_ptr<TensorData> data) {
  namespace functional = at::functionalization::impl;
  const c10::TensorImpl* impl = functional::isFunctionalTensor(tensor)
                                    ? functional::unsafeGetFunctionalWrapper(tensor)->value().unsafeGetTensorImpl()
                                    : tensor.unsafeGetTensorImpl();
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(*impl);
  if (lazy_tensor == nullptr || *lazy_tensor == nullptr) {
    Mismatch("only an XLA tensor can stand for another one");
  }
  // The member is not const, only torch's view of it is.
  places_[0] = const_cast<std::shared_ptr<TensorData>*>(&(*lazy_tensor)->data());
  places_[1] = &static_cast<HostTensor*>(lazy_tensor->get())->data;
  before_ = *places_[0];
  if (places_[1]->get() != before_.get()) {
    Mismatch("an XLA tensor does not keep a second pointer to its data right after torch's part");
  }
  for (std::shared_ptr<TensorData>* place : places_) {
    *place = data;
  }
}

StandIn::~StandIn() {
  for (std::shared_ptr<TensorData>* place : places_) {
    *place = before_;
  }
}

void VerifyExecutor(const lazy::LazyGraphExecutor& executor, bool eager_mode, bool allow_execution) {
  if (typeid(executor) == typeid(lazy::LazyGraphExecutor)) {
    Mismatch("the executor that runs graphs is torch's own");
  }
  const auto& host = static_cast<const HostExecutor&>(executor);
  // As bytes: what is not there may be no valid bool.
  unsigned char switches[2];
  std::memcpy(switches, &host.use_eager_mode, sizeof switches);
  // A string of libstdc++: where it is, its size, then either its characters, to which it points, or its capacity.
  std::uintptr_t name[3];
  std::memcpy(name, &host.current_graph_name, sizeof name);
  const bool inside = name[0] == reinterpret_cast<std::uintptr_t>(&host.current_graph_name) + 2 * sizeof name[0];
  const bool is_string = inside ? name[1] < 16 : name[0] != 0 && name[1] <= name[2] && name[2] >= 16;
  if (switches[0] != (eager_mode ? 1 : 0) || switches[1] != (allow_execution ? 1 : 0) || !is_string) {
    Mismatch("the executor does not keep the switch of eager mode where it was expected");
  }
}

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

CompiledGraph DescribeGraph(const HostCachedComputation& executable) {
  return {executable.computation->to_string(), executable.computation->get_memory_info()};
}

void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id) {
  namespace functional = at::functionalization::impl;
  const c10::TensorImpl* impl = functional::isFunctionalTensor(probe)
                                    ? functional::unsafeGetFunctionalWrapper(probe)->value().unsafeGetTensorImpl()
                                    : probe.unsafeGetTensorImpl();
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(*impl);
  if (lazy_tensor == nullptr) {
    Mismatch(std::string("an XLA tensor is a ") + typeid(*impl).name() + ", expected " + kTensorImplType);
  }
  const auto* tensor =
      dynamic_cast<const lazy::LazyTensor*>(static_cast<const c10::intrusive_ptr_target*>(lazy_tensor->get()));
  if (tensor == nullptr) {
    Mismatch("an XLA tensor does not keep its lazy tensor right after c10::TensorImpl");
  }
  if (tensor->GetUniqueId() != tensor_id) {
    Mismatch("a lazy tensor has id " + std::to_string(tensor->GetUniqueId()) + ", torch_xla says " +
             std::to_string(tensor_id));
  }
  const std::shared_ptr<TensorData>& data = tensor->data();
  if (std::strcmp(typeid(*data).name(), kTensorDataType) != 0) {
    Mismatch(std::string("a lazy tensor's data is a ") + typeid(*data).name() + ", expected " + kTensorDataType);
  }
  const HostTensorData& host = AsHost(*data);
  if (host.view != nullptr || host.logical_element_type != at::ScalarType::Int || host.sharding != nullptr ||
      host.alias_id != data->unique_id || host.is_cloned) {
    Mismatch(
        "view, element type, sharding, alias id or clone flag are not where they were expected in the data of a "
        "fresh tensor (alias id read: " +
        std::to_string(host.alias_id) + ", tensor id: " + std::to_string(data->unique_id) + ")");
  }
  if (data->handle == nullptr || !data->handle->HasValue()) {
    Mismatch("an uploaded tensor has no device data");
  }
  const std::string shape = DescribeBuffer(*data->handle);
  if (shape.rfind("s32[3]", 0) != 0) {
    Mismatch("device data describes itself as '" + shape + "', expected a text that starts with s32[3]");
  }
}

}  // namespace torch_xla_donate::abi
