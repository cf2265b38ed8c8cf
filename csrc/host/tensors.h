// Tensors of torch_xla: what they hold, and how a feature changes that.
//
// Ownership: owns host objects only through the shared_ptr it returns.
// Threads: any thread may call all functions, with or without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

// Prefetches what Resolve() reads of these tensors. After a step, none of a thousand tensors is in the cache, and the
// misses of Resolve() wait for each other.
void Prefetch(const std::vector<const at::Tensor*>& tensors);

// The tensor's current data, without pending updates; null if it is not a tensor of torch_xla.
const TensorData* ValueOf(const c10::TensorImpl& tensor);

// The device data that a lazy tensor holds, directly or as the only node of its graph; null if it holds none.
lazy::BackendDataPtr BufferOf(const TensorData& tensor);

// Sets the array that a step will write the tensor's value into, as torch_xla does when it schedules the step.
void GiveArray(TensorData& tensor, lazy::BackendDataPtr array);

// Whether the tensor is a view, or has a view, that shares its graph. False under functionalization.
bool HasView(const TensorData& tensor);

// The object of a tensor's sharding, for comparison; null if not sharded. Another sharding is another object.
const std::shared_ptr<void>& ShardingOf(const TensorData& tensor);

// The id by which the executor recognises an output that replaces an input. It donates each parameter whose
// DeviceDataInfo has the alias id of an output.
std::int64_t AliasId(const TensorData& tensor);

// The array that a step would compute for the tensor, without layout and sharding: "f32[8,4]". Returns nullopt if the
// tensor has no pending work, and an empty text if the host's text cannot be parsed.
std::optional<std::string> PendingArray(const TensorData& tensor);

// Makes a tensor represent other data while the object lives. So torch_xla's functions, which take tensors, can
// describe data that has no at::Tensor. Only the caller may use the tensor.
class StandIn {
 public:
  // Throws std::runtime_error if `tensor` is not an XLA tensor or has another layout.
  StandIn(const at::Tensor& tensor, std::shared_ptr<TensorData> data);
  ~StandIn();
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

 private:
  // torch's pointer to the data, and torch_xla's.
  std::shared_ptr<TensorData>* places_[2];
  std::shared_ptr<TensorData> before_;
};

}  // namespace torch_xla_donate::abi
