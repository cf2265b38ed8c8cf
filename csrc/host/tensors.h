// Tensors of torch_xla: what they hold, and how a feature changes that.
//
// Ownership: owns host objects only through the shared_ptr it returns.
// Threads: any thread may call all functions, with or without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "host/symbols.h"

namespace torch_xla_donate::abi {

enum class TensorState {
  kMaterialized,  // holds device data
  kPending,       // queued work computes it, or its host value has not been uploaded
  kReadOnly,      // device data that torch_xla shares between tensors: cached constants, the RNG seed
  kViewed,        // functionalization is off and the tensor is a view or has views
  kDynamic,       // device data whose size only the device knows
  kNotXla,        // not an XLA tensor, or not of torch_xla's own class
};

struct Resolution {
  TensorState state = TensorState::kNotXla;
  std::shared_ptr<TensorData> tensor;  // set unless kNotXla; shared by detach(), .data and the like
  lazy::BackendDataPtr buffer;         // set if kMaterialized, kReadOnly or kDynamic
};

// Returns what a tensor holds. Applies pending view updates first, as torch_xla does whenever it unwraps a tensor.
Resolution Resolve(const at::Tensor& tensor);

// What a tensor holds in the most frequent case: materialised device data, and no pending updates. The pointers are
// valid while the tensor is alive and no step replaces its data.
struct HeldArray {
  const std::shared_ptr<TensorData>* tensor;
  const lazy::BackendDataPtr* buffer;
  at::IntArrayRef sizes;
};
// Nullopt in other cases, which Resolve() knows. Does not look whether torch_xla shares the data (see InfosLocked).
std::optional<HeldArray> HeldBy(const at::Tensor& tensor);

// Prefetches what Resolve() reads of these tensors. After a step, none of a thousand tensors is in the cache, and the
// misses of Resolve() wait for each other.
void Prefetch(at::ArrayRef<const at::Tensor*> tensors);

// The tensor's current data, without pending updates; null if it is not a tensor of torch_xla.
const TensorData* ValueOf(const c10::TensorImpl& tensor);
// The buffer of that data; null if it is not computed yet, or there is none.
lazy::BackendDataPtr BufferOfValue(const at::Tensor& tensor);

// The device data that a lazy tensor holds, directly or as the only node of its graph; null if it holds none.
lazy::BackendDataPtr BufferOf(const TensorData& tensor);

// XLA's number of a buffer's element type. The tensor's dtype may be another one: torch_xla computes some indices, such
// as those of cummax, in 32 bits.
std::int32_t ElementTypeOf(const lazy::BackendData& buffer);

// Sets the array that a step will write the tensor's value into, as torch_xla does when it schedules the step.
void GiveArray(TensorData& tensor, lazy::BackendDataPtr array);

// Whether the tensor is a view, or has a view, that shares its graph. False under functionalization.
bool HasView(const TensorData& tensor);

// The object of a tensor's sharding, for comparison; null if not sharded. Another sharding is another object.
const std::shared_ptr<void>& ShardingOf(const TensorData& tensor);

// The id by which the executor recognises an output that replaces an input. It donates each parameter whose
// DeviceDataInfo has the alias id of an output.
std::int64_t AliasId(const TensorData& tensor);

}  // namespace torch_xla_donate::abi
