// Reads and writes torch_xla's part of a tensor through the layouts.
#include "host/tensors.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/lazy/backend/backend_interface.h>

#include <utility>

#include "host/graphs.h"
#include "host/layouts.h"

namespace torch_xla_donate::abi {

lazy::BackendDataPtr BufferOf(const TensorData& tensor) {
  if (tensor.handle != nullptr || !tensor.ir_value) {
    return tensor.handle;
  }
  return lazy::getBackend()->GetComputationDataFromNode(tensor.ir_value.node.get());
}

std::int32_t ElementTypeOf(const lazy::BackendData& buffer) {
  return static_cast<const HostBuffer&>(buffer).element_type;
}

void GiveArray(TensorData& tensor, lazy::BackendDataPtr array) {
  auto& host = static_cast<HostTensorData&>(tensor);
  host.handle = std::move(array);
  host.view = nullptr;
  host.tensor_data.reset();
  host.is_cloned = false;
}

bool HasView(const TensorData& tensor) { return AsHost(tensor).view != nullptr; }

const std::shared_ptr<void>& ShardingOf(const TensorData& tensor) { return AsHost(tensor).sharding; }

std::int64_t AliasId(const TensorData& tensor) { return AsHost(tensor).alias_id; }

const TensorData* ValueOf(const c10::TensorImpl& tensor) {
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(ValueImplOf(&tensor));
  return lazy_tensor == nullptr || *lazy_tensor == nullptr ? nullptr : (*lazy_tensor)->data().get();
}

lazy::BackendDataPtr BufferOfValue(const at::Tensor& tensor) {
  const TensorData* data = ValueOf(*tensor.unsafeGetTensorImpl());
  return data == nullptr ? nullptr : BufferOf(*data);
}

Resolution Resolve(const at::Tensor& tensor) {
  Resolution result;
  if (WrapperOf(tensor) != nullptr) {
    at::functionalization::impl::sync(tensor);
  }
  const c10::TensorImpl& impl = ValueImplOf(tensor.unsafeGetTensorImpl());
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(impl);
  if (lazy_tensor == nullptr || *lazy_tensor == nullptr) {
    return result;
  }
  result.tensor = (*lazy_tensor)->data();
  if (HasView(*result.tensor)) {
    result.state = TensorState::kViewed;
    return result;
  }
  // A clone has the graph of its source until a step gives it a separate buffer.
  const bool is_clone = result.tensor->handle == nullptr && AsHost(*result.tensor).is_cloned;
  result.buffer = is_clone ? nullptr : BufferOf(*result.tensor);
  if (result.buffer == nullptr) {
    result.state = TensorState::kPending;
    return result;
  }
  const std::optional<DeviceDataInfo> info = InfoOf(*result.buffer);
  result.state = info.has_value() && info->read_only ? TensorState::kReadOnly
                 : impl.has_symbolic_sizes_strides() ? TensorState::kDynamic
                                                     : TensorState::kMaterialized;
  return result;
}

std::optional<HeldArray> HeldBy(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (const at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor)) {
    if (!wrapper->is_up_to_date()) {
      return std::nullopt;
    }
    impl = wrapper->value().unsafeGetTensorImpl();
  }
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(*impl);
  if (lazy_tensor == nullptr || *lazy_tensor == nullptr || impl->has_symbolic_sizes_strides()) {
    return std::nullopt;
  }
  const std::shared_ptr<TensorData>& data = (*lazy_tensor)->data();
  if (data->handle == nullptr || HasView(*data)) {
    return std::nullopt;
  }
  return HeldArray{&data, &data->handle, impl->sizes()};
}

void Prefetch(at::ArrayRef<const at::Tensor*> tensors) {
  // A shared object follows its counters.
  constexpr std::size_t kCounters = 16;
  c10::SmallVector<const char*, 64> next;
  for (const at::Tensor* tensor : tensors) {
    __builtin_prefetch(tensor->unsafeGetTensorImpl());
    __builtin_prefetch(reinterpret_cast<const char*>(tensor->unsafeGetTensorImpl()) + sizeof(c10::TensorImpl));
  }
  for (const at::Tensor* tensor : tensors) {
    const c10::TensorImpl* impl = tensor->unsafeGetTensorImpl();
    if (const at::FunctionalTensorWrapper* wrapper = WrapperOf(*tensor)) {
      const char* storage = reinterpret_cast<const char*>(wrapper->storage().unsafeGetStorageImpl());
      __builtin_prefetch(storage);
      __builtin_prefetch(storage + sizeof(c10::StorageImpl));
      impl = wrapper->value().unsafeGetTensorImpl();
    }
    next.push_back(reinterpret_cast<const char*>(impl));
    __builtin_prefetch(next.back());
    __builtin_prefetch(next.back() + sizeof(c10::TensorImpl));
  }
  c10::SmallVector<const lazy::LazyTensor*, 64> lazy_tensors;
  for (const char* impl : next) {
    const lazy::LazyTensorPtr* found = LazyTensorOf(*reinterpret_cast<const c10::TensorImpl*>(impl));
    if (found != nullptr && *found != nullptr) {
      lazy_tensors.push_back(found->get());
      __builtin_prefetch(lazy_tensors.back());
    }
  }
  c10::SmallVector<const TensorData*, 64> held;
  for (const lazy::LazyTensor* tensor : lazy_tensors) {
    held.push_back(tensor->data().get());
    const char* data = reinterpret_cast<const char*>(held.back());
    __builtin_prefetch(data - kCounters);
    for (std::size_t line = 0; line < sizeof(HostTensorData); line += 64) {
      __builtin_prefetch(data + line);
    }
  }
  c10::SmallVector<const lazy::BackendData*, 64> buffers;
  for (const TensorData* data : held) {
    if (data->handle != nullptr) {
      buffers.push_back(data->handle.get());
      __builtin_prefetch(reinterpret_cast<const char*>(buffers.back()) - kCounters);
      __builtin_prefetch(buffers.back());
      __builtin_prefetch(&static_cast<const HostBuffer*>(buffers.back())->element_type);
    }
  }
  for (const lazy::BackendData* buffer : buffers) {
    __builtin_prefetch(buffer->info());
  }
}

}  // namespace torch_xla_donate::abi
