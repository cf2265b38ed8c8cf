// What this package knows of torch_xla beyond its public interface. Every other file goes through here.
//
// The stock wheel ships no headers and hides its own C++ symbols; what it imports from libtorch is visible, and the
// classes it derives from are torch's. So three kinds of knowledge are needed, all of them kept in torch_xla_abi.cpp:
// the mangled names of a few imports, where an at::Tensor keeps its lazy tensor, and what follows torch's part of a
// lazy tensor's data. third_party/host_facts.md lists the versions for which each was compared.
//
// Ownership: nothing here owns host objects beyond the shared_ptr it returns.
// Threads: all functions may be called from any thread, with or without the GIL.
// Errors: Resolve() reports by value; VerifyLayouts() throws std::runtime_error and must pass before Resolve() is used.
#pragma once

#include <torch/csrc/lazy/core/lazy_graph_executor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_xla_donate::abi {

namespace lazy = torch::lazy;

using TensorData = lazy::LazyTensor::Data;
using DeviceDataInfo = lazy::LazyGraphExecutor::DeviceDataInfo;

// The executor's note on device data; null if there is none, or one of another kind.
const DeviceDataInfo* InfoOf(const lazy::BackendData& buffer);

// The executor's nested types are protected; deriving is the way to name them.
struct Executor : lazy::LazyGraphExecutor {
  using LazyGraphExecutor::Async;
  using LazyGraphExecutor::PostOrderData;
  using LazyGraphExecutor::SyncTensorCollection;

  // Torch's own function, whatever hooks there are.
  void PassBarrier(SyncTensorCollection* collection) { LazyGraphExecutor::TensorCollectionBarrier(collection); }
};

// Member functions as the free functions they are in the Itanium C++ ABI: `this` comes first.
using RunPostOrderFn = Executor::PostOrderData (*)(lazy::LazyGraphExecutor*, const std::vector<lazy::Value>&,
                                                   Executor::SyncTensorCollection*);
using AsyncConstructorFn = void (*)(Executor::Async*, Executor::SyncTensorCollection*,
                                    std::vector<lazy::BackendDataPtr>, std::vector<lazy::BackendDataPtr>,
                                    lazy::LazyGraphExecutor::ComputationCache::TypePtr);
using LazyTensorConstructorFn = void (*)(lazy::LazyTensor*, std::shared_ptr<TensorData>);
using CurrentDataHandleFn = lazy::BackendDataPtr (*)(const lazy::LazyTensor*);
using CreateTensorNodeFn = lazy::Value (*)(const lazy::LazyTensor*, const lazy::BackendDataPtr&, bool);
using ForAllDeviceContextsFn = void (*)(void* arena, const void* function, const lazy::BackendDevice*);
using TensorCollectionBarrierFn = void (*)(lazy::LazyGraphExecutor*, Executor::SyncTensorCollection*);
using MarkStepFn = void (*)(void* arena, const lazy::BackendDevice&);
using CompleterFn = std::function<void()> (*)(lazy::MultiWait*, std::function<void()>);

// Mangled names of the imports behind these types.
extern const char* const kRunPostOrder;
extern const char* const kAsyncConstructor;
extern const char* const kLazyTensorConstructor;
extern const char* const kCurrentDataHandle;
extern const char* const kCreateTensorNode;
extern const char* const kForAllDeviceContexts;
extern const char* const kTensorCollectionBarrier;
extern const char* const kMarkStep;
extern const char* const kCompleter;

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

// The device data that a lazy tensor holds, directly or as the only node of its graph; null if there is none.
lazy::BackendDataPtr BufferOf(const TensorData& tensor);

// Makes every view of the tensor compute itself anew, from the tensor, when it is used next. A view that was computed
// before has a buffer of its own in torch_xla, and would not notice that its base is gone. Does nothing without
// functionalization, and to a tensor that is a view itself.
void InvalidateViews(const at::Tensor& tensor);

// Waits until whatever is being started on the device has been handed over to it, and its buffers let go. The caller
// must not hold the GIL. Passes on what made an earlier step fail, as torch_xla does where it waits for it.
void WaitForHandOver(const lazy::BackendDevice& device);

// Whether the tensor is, or has, a view that shares its graph. Only without functionalization.
bool HasView(const TensorData& tensor);

// The id by which the executor recognises an output that replaces an input. It donates the parameters whose
// DeviceDataInfo carries the alias id of one of the step's outputs.
std::int64_t AliasId(const TensorData& tensor);

// Whether the switch of eager mode is on, of the executor that passes the hooks (torch's registered one is another).
bool InEagerMode(const lazy::LazyGraphExecutor& executor);

// Compares what the executor is known to say with where it is expected. Throws std::runtime_error if it differs.
void VerifyExecutor(const lazy::LazyGraphExecutor& executor, bool eager_mode, bool allow_execution);

// Shape, layout and sharding of device data as XLA writes them, for example "f32[8,4]{1,0}", and " sharding={...}"
// where there is one. Empty if the host's text is not understood.
std::string DescribeBuffer(const lazy::BackendData& buffer);

// A compiled graph in XLA's words: the optimised HLO module, and the bytes that a run takes.
struct CompiledGraph {
  std::string text;
  std::string memory;
};
// The graph of a run that has been prepared. Throws std::runtime_error if the objects are not of the classes expected.
CompiledGraph DescribeGraph(const Executor::Async& run);

// Compares a fresh, uploaded float32[3] probe and torch_xla's own id of it with all that is assumed here.
// Throws std::runtime_error that names the first assumption which does not hold.
void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id);

}  // namespace torch_xla_donate::abi
