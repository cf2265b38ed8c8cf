// The memory layouts of torch_xla's classes. Only files of this folder include this; graphs.h has the checks.
//
// The stock wheel ships no headers and hides its C++ symbols. Its classes derive from torch's, so a layout here adds
// the members after torch's part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "host/symbols.h"

namespace torch_xla_donate::abi {

[[noreturn]] void Mismatch(const std::string& what);

// The names of the types, as in typeid().
inline constexpr const char* kAsyncType = "N9torch_xla16XLAGraphExecutor5AsyncE";
inline constexpr const char* kComputationType = "N9torch_xla7runtime21PjRtComputationClient15PjRtComputationE";

// torch_xla::runtime::ComputationClient::Computation: the virtual function it adds, after torch's seven.
struct HostComputation : lazy::Computation {
  virtual const std::string get_memory_info() const = 0;
};
inline constexpr std::size_t kComputationVirtuals = 8;
struct HostCachedComputation {
  std::shared_ptr<HostComputation> computation;
  bool is_sharded;
};
// torch_xla::XLAGraphExecutor::Async: the members after torch's part.
struct HostAsync : Executor::Async {
  std::shared_ptr<HostCachedComputation> cached_computation;
};

// torch_xla::runtime::ComputationClient::Data: the first of the three virtual functions it adds, after torch's five,
// and the members after torch's part up to the first one of its xla::Shape. Not in an unnamed namespace, because the
// compiler would then assume that no class overrides it.
struct HostBuffer : lazy::BackendData {
  virtual std::string ToString() const = 0;
  std::string device;
  std::int32_t element_type;
};
inline constexpr std::size_t kBufferVirtuals = 8;

// torch_xla::XLATensor::Data: the members after torch's part.
struct HostTensorData : TensorData {
  std::shared_ptr<void> view;
  std::optional<at::ScalarType> logical_element_type;
  std::shared_ptr<void> sharding;
  std::int64_t alias_id;
  bool is_cloned;
};

inline const HostTensorData& AsHost(const TensorData& data) { return static_cast<const HostTensorData&>(data); }

// Functionalization's wrapper; null if the tensor has none.
inline at::FunctionalTensorWrapper* WrapperOf(const at::Tensor& tensor) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const bool is_wrapper = impl->key_set().has(c10::DispatchKey::Functionalize);
  return is_wrapper ? static_cast<at::FunctionalTensorWrapper*>(impl) : nullptr;
}

// The impl that has the tensor's value, inside the wrapper if there is one.
const c10::TensorImpl& ValueImplOf(const c10::TensorImpl* impl);

// The pointer to the lazy tensor, which torch_xla::XLATensorImpl has after c10::TensorImpl. Null for another class.
const lazy::LazyTensorPtr* LazyTensorOf(const c10::TensorImpl& impl);

}  // namespace torch_xla_donate::abi
