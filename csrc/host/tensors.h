// Tensors of torch_xla: what they hold, and how a feature changes that.
//
// Ownership: nothing here owns host objects beyond the shared_ptr it returns.
// Threads: all functions may be called from any thread, with or without the GIL.
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
  kPending,       // work is queued that computes it, or its host value has not been uploaded
  kReadOnly,      // device data that torch_xla shares between tensors: cached constants, the RNG seed
  kViewed,        // functionalization is off and the tensor is a view or has views
  kDynamic,       // device data of a size that only the device knows
  kNotXla,        // not an XLA tensor, or not one of torch_xla's own class
};

struct Resolution {
  TensorState state = TensorState::kNotXla;
  std::shared_ptr<TensorData> tensor;  // set unless kNotXla; shared by detach(), .data and the like
  lazy::BackendDataPtr buffer;         // set if kMaterialized, kReadOnly or kDynamic
};

// What a tensor holds. Applies pending view updates first, as torch_xla does before it looks at a tensor.
Resolution Resolve(const at::Tensor& tensor);

// Brings what Resolve() reads of these tensors into the cache. A step leaves nothing of a thousand tensors there, and
// in Resolve() each miss waits for the one before.
void Prefetch(const std::vector<const at::Tensor*>& tensors);

// The data that a tensor has now, without what is pending; null if it is not a tensor of torch_xla's.
const TensorData* ValueOf(const c10::TensorImpl& tensor);

// The device data that a lazy tensor holds, directly or as the only node of its graph; null if there is none.
lazy::BackendDataPtr BufferOf(const TensorData& tensor);

// A step will write the tensor's value into this array: what torch_xla does when it schedules the step.
void GiveArray(TensorData& tensor, lazy::BackendDataPtr array);

// Whether the tensor is, or has, a view that shares its graph. Only without functionalization.
bool HasView(const TensorData& tensor);

// The object that describes a tensor's sharding, for comparing; null without one. Another sharding is another object.
const std::shared_ptr<void>& ShardingOf(const TensorData& tensor);

// The id by which the executor recognises an output that replaces an input. It donates the parameters whose
// DeviceDataInfo carries the alias id of one of the step's outputs.
std::int64_t AliasId(const TensorData& tensor);

// The array that a step would compute for the tensor, without layout and sharding: "f32[8,4]". Nothing if the tensor
// has no pending work; an empty text if it has, and the host's text for it is not understood.
std::optional<std::string> PendingArray(const TensorData& tensor);

// Lets a tensor stand for other data as long as this lives, so that torch_xla's functions, which take tensors, can be
// asked about data of which there is no at::Tensor at hand. The tensor must be the caller's alone.
class StandIn {
 public:
  // Throws std::runtime_error if it is not an XLA tensor, or not laid out as expected.
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
