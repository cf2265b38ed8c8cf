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

#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/lazy/core/lazy_graph_executor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
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
  using LazyGraphExecutor::DeviceContextArena;
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
// Declared by value, which both supported ABIs (Itanium, on x86-64 and aarch64) pass as a reference to the caller's
// object. Taken as that it need not be moved.
using LazyTensorConstructorFn = void (*)(lazy::LazyTensor*, std::shared_ptr<TensorData>&);
using CurrentDataHandleFn = lazy::BackendDataPtr (*)(const lazy::LazyTensor*);
using CreateTensorNodeFn = lazy::Value (*)(const lazy::LazyTensor*, const lazy::BackendDataPtr&, bool);
using ForAllDeviceContextsFn = void (*)(void* arena, const void* function, const lazy::BackendDevice*);
using TensorCollectionBarrierFn = void (*)(lazy::LazyGraphExecutor*, Executor::SyncTensorCollection*);
using MarkStepFn = void (*)(void* arena, const lazy::BackendDevice&);
using CompleterFn = std::function<void()> (*)(lazy::MultiWait*, std::function<void()>);
using CommitUpdateFn = void (*)(at::FunctionalTensorWrapper*);
// The last argument is a reference to what describes the view, of a type that differs between versions.
using ViewConstructorFn = void (*)(at::FunctionalTensorWrapper*, const at::Tensor&, const at::FunctionalTensorWrapper*,
                                   const void*);
using CopyTensorMetadataFn = void (*)(const at::FunctionalTensorWrapper*, at::FunctionalTensorWrapper*,
                                      const c10::VariableVersion&, bool);
using MutateViewMetaFn = void (*)(at::FunctionalTensorWrapper*, const void*);

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
// Of libtorch's functionalization. Torch 2.7 and 2.8 have some under the second name.
extern const char* const kCommitUpdate;
extern const char* const kViewConstructor[2];
extern const char* const kCopyTensorMetadata;
extern const char* const kMutateViewMeta[2];

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

// The live tensors of a device that were made after the one of this id; `arena` is the executor's own.
std::vector<std::shared_ptr<TensorData>> TensorsSince(void* arena, const lazy::BackendDevice& device, std::int64_t id);

// The buffer of a storage's base tensor, to which writes that have not been applied yet will be added; null if it is
// still to be computed, or not torch_xla's.
lazy::BackendDataPtr BaseBuffer(const at::FunctionalTensorWrapper& tensor);
// The buffer of the value that the tensor has itself; null likewise.
lazy::BackendDataPtr ValueBuffer(const at::FunctionalTensorWrapper& tensor);
// The value that the tensor has counts as that of its storage, so that it is not worked out again.
void SetUpToDate(at::FunctionalTensorWrapper& tensor);
// The write that the tensor's storage has noted last reaches the base now. If it cannot, the storage and the other
// views are as before, and the next use of the tensor written raises, too.
void ApplyLastWrite(at::FunctionalTensorWrapper& written);
// As SetUpToDate, for any tensor that has been resolved.
void KeepValue(const at::Tensor& tensor);

// The data that a tensor has now, without what is pending; null if it is not a tensor of torch_xla's.
const TensorData* ValueOf(const c10::TensorImpl& tensor);

// Whether nodes are kept for graphs to come (torch's torch_lazy_reuse_ir), with whatever they read.
bool KeepsNodes();

// The buffer that a tensor holds, or from which it will be computed when it is used, if it is a view that is out of
// date; null if there is none. Computes nothing, unlike Resolve().
lazy::BackendDataPtr BufferBehind(const at::Tensor& tensor);

// What a tensor holds. Applies pending view updates first, as torch_xla does before it looks at a tensor.
Resolution Resolve(const at::Tensor& tensor);

// Brings what Resolve() reads of these tensors into the cache. A step leaves nothing of a thousand tensors there, and
// in Resolve() each miss waits for the one before.
void Prefetch(const std::vector<const at::Tensor*>& tensors);

// The device data that a lazy tensor holds, directly or as the only node of its graph; null if there is none.
lazy::BackendDataPtr BufferOf(const TensorData& tensor);

// A step will write the tensor's value into this array: what torch_xla does when it schedules the step.
void GiveArray(TensorData& tensor, lazy::BackendDataPtr array);

// Makes every view of the tensor compute itself anew, from the tensor, when it is used next. A view that was computed
// before has a buffer of its own in torch_xla, and would not notice that its base is gone. Does nothing without
// functionalization, and to a tensor that is a view itself.
void InvalidateViews(const at::Tensor& tensor);

// Waits until whatever is being started on the device has been handed over to it, and its buffers let go. The caller
// must not hold the GIL. Passes on what made an earlier step fail, as torch_xla does where it waits for it.
void WaitForHandOver(const lazy::BackendDevice& device);

// Whether the tensor is, or has, a view that shares its graph. Only without functionalization.
bool HasView(const TensorData& tensor);

// The object that describes a tensor's sharding, for comparing; null without one. Another sharding is another object.
const std::shared_ptr<void>& ShardingOf(const TensorData& tensor);

// The id by which the executor recognises an output that replaces an input. It donates the parameters whose
// DeviceDataInfo carries the alias id of one of the step's outputs.
std::int64_t AliasId(const TensorData& tensor);

// Whether the switch of eager mode is on, of the executor that passes the hooks (torch's registered one is another).
bool InEagerMode(const lazy::LazyGraphExecutor& executor);

// Compares what the executor is known to say with where it is expected. Throws std::runtime_error if it differs.
void VerifyExecutor(const lazy::LazyGraphExecutor& executor, bool eager_mode, bool allow_execution);

// The outputs of a step, by the ids that tell which inputs torch_xla donates to them by itself.
class OutputIds {
 public:
  // Of several with one id, which share a buffer, the first one counts.
  void Add(const TensorData& output) { place_of_.emplace(AliasId(output), added_++); }
  // The output that replaces the buffer, counted in the order of Add(); nothing if torch_xla does not donate it.
  std::optional<std::size_t> ReplacementOf(const lazy::BackendData& buffer) const;
  bool Empty() const { return place_of_.empty(); }
  // An id of an output, whichever; there must be one.
  std::int64_t Any() const { return place_of_.begin()->first; }

 private:
  std::unordered_map<std::int64_t, std::size_t> place_of_;
  std::size_t added_ = 0;
};

// The device as torch and torch_xla's Python functions know it, such as xla:0. Throws std::runtime_error if it is none
// of this process.
at::Device TorchDevice(const lazy::BackendDevice& device);

// Whether a device stands for all devices of an SPMD program.
bool IsSpmd(const lazy::BackendDevice& device);

// Shape, layout and sharding of device data as XLA writes them, for example "f32[8,4]{1,0}", and " sharding={...}"
// where there is one. Empty if the host's text is not understood.
std::string DescribeBuffer(const lazy::BackendData& buffer);

// The array that a node's output will be, without layout and sharding: "f32[8,4]". Empty if the host's text for it is
// not understood.
std::string DescribeNode(const lazy::Value& value);
// The array that a step would compute for the tensor, without layout and sharding: "f32[8,4]". Nothing if the tensor
// has no pending work; an empty text if it has, and the host's text for it is not understood.
std::optional<std::string> PendingArray(const TensorData& tensor);

// Whether somebody has given the node a sharding.
bool IsAnnotated(const lazy::Node& node);

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

// A compiled graph in XLA's words: the optimised HLO module, and the bytes that a run takes.
struct CompiledGraph {
  std::string text;
  std::string memory;
};
// The executable of a run that has been prepared. Throws std::runtime_error if the objects are not of the classes
// expected.
struct HostCachedComputation;
std::shared_ptr<const HostCachedComputation> ExecutableOf(const Executor::Async& run);
CompiledGraph DescribeGraph(const HostCachedComputation& executable);

// Compares a fresh, uploaded int32[3] probe and torch_xla's own id of it with all that is assumed here.
// Throws std::runtime_error that names the first assumption which does not hold.
void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id);

}  // namespace torch_xla_donate::abi
