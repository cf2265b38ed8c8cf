// Checks the layouts, and finds the lazy tensor of a torch tensor.
#include "host/layouts.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <typeinfo>

#include "host/array_text.h"
#include "host/graphs.h"
#include "host/object_check.h"
#include "host/tensors.h"

namespace torch_xla_donate::abi {

namespace {

constexpr const char* kTensorImplType = "N9torch_xla13XLATensorImplE";
constexpr const char* kTensorType = "N9torch_xla9XLATensorE";
constexpr const char* kTensorDataType = "N9torch_xla9XLATensor4DataE";
constexpr const char* kBufferType = "N9torch_xla7runtime21PjRtComputationClient8PjRtDataE";
constexpr const char* kShardedBufferType = "N9torch_xla7runtime21PjRtComputationClient15PjRtShardedDataE";

}  // namespace

void Mismatch(const std::string& what) { throw std::runtime_error(what); }

const c10::TensorImpl& ValueImplOf(const c10::TensorImpl* impl) {
  const bool is_functional = impl->key_set().has(c10::DispatchKey::Functionalize);
  return is_functional ? *static_cast<const at::FunctionalTensorWrapper*>(impl)->value().unsafeGetTensorImpl() : *impl;
}

const lazy::LazyTensorPtr* LazyTensorOf(const c10::TensorImpl& impl) {
  // After the first comparison of the texts, the address of the type's name identifies the type cheaply.
  static std::atomic<const char*> known{nullptr};
  const char* const name = typeid(impl).name();
  if (name != known.load(std::memory_order_relaxed)) {
    if (std::strcmp(name, kTensorImplType) != 0) {
      return nullptr;
    }
    known.store(name, std::memory_order_relaxed);
  }
  return reinterpret_cast<const lazy::LazyTensorPtr*>(reinterpret_cast<const char*>(&impl) + sizeof(c10::TensorImpl));
}

void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id, bool is_sharded) {
  const c10::TensorImpl& impl = ValueImplOf(probe.unsafeGetTensorImpl());
  const lazy::LazyTensorPtr* lazy_tensor = LazyTensorOf(impl);
  if (lazy_tensor == nullptr) {
    Mismatch(std::string("an XLA tensor is a ") + typeid(impl).name() + ", expected " + kTensorImplType);
  }
  const ObjectCheck check(typeid(impl));
  check.Readable("the place of an XLA tensor's lazy tensor", lazy_tensor, sizeof *lazy_tensor);
  const lazy::LazyTensor* const tensor = lazy_tensor->get();
  check.Object("the lazy tensor of an XLA tensor", tensor, sizeof *tensor, {kTensorType});
  // Not by data(), which is torch's and reports an empty pointer in other words.
  static_assert(sizeof(lazy::LazyTensor) == sizeof(c10::intrusive_ptr_target) + sizeof(std::shared_ptr<TensorData>));
  const TensorData* found;
  std::memcpy(static_cast<void*>(&found), reinterpret_cast<const char*>(tensor) + sizeof(c10::intrusive_ptr_target),
              sizeof(void*));
  check.Object("the data of a lazy tensor", found, sizeof(HostTensorData), {kTensorDataType});
  if (tensor->GetUniqueId() != tensor_id) {
    Mismatch("a lazy tensor has id " + std::to_string(tensor->GetUniqueId()) + ", torch_xla says " +
             std::to_string(tensor_id));
  }
  const std::shared_ptr<TensorData>& data = tensor->data();
  const HostTensorData& host = AsHost(*data);
  if (host.view != nullptr || host.logical_element_type != at::ScalarType::Int ||
      (host.sharding != nullptr) != is_sharded || host.alias_id != data->unique_id || host.is_cloned) {
    const auto is = [](const char* field, bool set) { return std::string(field) + (set ? " set, " : " empty, "); };
    Mismatch(
        "view, element type, sharding, alias id or clone flag are not where they were expected in the data of a "
        "fresh tensor (" +
        is("view", host.view != nullptr) + is("element type int32", host.logical_element_type == at::ScalarType::Int) +
        is("sharding", host.sharding != nullptr) + is("clone flag", host.is_cloned) + "alias id " +
        std::to_string(host.alias_id) + ", tensor id " + std::to_string(data->unique_id) + ")");
  }
  const char* const what = "the device data of an uploaded tensor";
  check.Object(what, data->handle.get(), sizeof(HostBuffer), {kBufferType, kShardedBufferType});
  check.Virtuals(what, data->handle.get(), kBufferVirtuals);
  if (!data->handle->HasValue()) {
    Mismatch("an uploaded tensor has no device data");
  }
  const std::string shape = DescribeBuffer(*data->handle);
  if (shape.rfind("s32[3]", 0) != 0) {
    Mismatch("device data describes itself as '" + shape + "', expected a text that starts with s32[3]");
  }
  if (ElementType(ElementTypeOf(*data->handle)) != at::kInt) {
    Mismatch("device data does not keep its element type where it was expected");
  }
}

}  // namespace torch_xla_donate::abi
