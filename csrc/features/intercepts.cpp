// The intercepts of a step and of uses of tensors, a few lines each, and the table of all hooks.
#include <exception>
#include <string>
#include <utility>

#include "features/outdated_tensors.h"
#include "features/run_guard.h"
#include "features/use_guard.h"
#include "features/whole_overwrites.h"
#include "host/symbols.h"
#include "registry/watch.h"
#include "repairs/device_text.h"
#include "step/hooks.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

namespace {

using abi::Executor;

Original run_post_order, async_constructor, lazy_tensor_constructor, current_data_handle, create_tensor_node,
    for_all_device_contexts, device_barrier, tensor_collection_barrier, mark_step, completer, device_to_string;

// ---- The intercepts of a step, in its order ----
//
// Each has the type of the function that it replaces. Member functions are free functions, as in the Itanium C++ ABI:
// `this` comes first. The constructor of a tensor takes its argument by value, which both supported ABIs (Itanium, on
// x86-64 and aarch64) pass as a reference to the caller's object, so that the hook need not move it.

void ForAllDeviceContexts(void* arena, const void* function, const lazy::BackendDevice* device) {
  ThreadStep::Get().List(
      arena, device, [&] { for_all_device_contexts.As<decltype(&ForAllDeviceContexts)>()(arena, function, device); });
}

// Each live tensor passes the next two hooks in each step. The code for watched tensors is a separate function, so that
// without watches the hook is a test and a jump.
[[gnu::noinline]] void WatchedConstructor(lazy::LazyTensor* self, std::shared_ptr<abi::TensorData>& data) {
  ThreadStep::Get().TensorMade(*data);
  lazy_tensor_constructor.As<decltype(&WatchedConstructor)>()(self, data);
}

void LazyTensorConstructor(lazy::LazyTensor* self, std::shared_ptr<abi::TensorData>& data) {
  return Watches(kListed) ? WatchedConstructor(self, data)
                          : lazy_tensor_constructor.As<decltype(&LazyTensorConstructor)>()(self, data);
}

lazy::BackendDataPtr CurrentDataHandle(const lazy::LazyTensor* self);

// A function of its own, so that a read of the list, of which a step has one for each live tensor, needs no clean-up.
[[gnu::noinline]] lazy::BackendDataPtr HandleForProgram(ThreadStep& step, const lazy::LazyTensor* self) {
  lazy::BackendDataPtr handle = current_data_handle.As<decltype(&CurrentDataHandle)>()(self);
  if (!step.IsListRead(*self, handle != nullptr) && handle != nullptr && (Watches(kEmpty) || IsGone(handle.get())) &&
      !IsReplacing()) {
    CheckRead(handle.get());
  }
  return handle;
}

[[gnu::noinline]] lazy::BackendDataPtr WatchedHandle(const lazy::LazyTensor* self) {
  ThreadStep& step = ThreadStep::Get();
  return step.IsNextListRead(*self) ? current_data_handle.As<decltype(&WatchedHandle)>()(self)
                                    : HandleForProgram(step, self);
}

lazy::BackendDataPtr CurrentDataHandle(const lazy::LazyTensor* self) {
  return Watches(kListed) ? WatchedHandle(self) : current_data_handle.As<decltype(&CurrentDataHandle)>()(self);
}

Executor::PostOrderData RunPostOrder(lazy::LazyGraphExecutor* self, const std::vector<lazy::Value>& roots,
                                     Executor::SyncTensorCollection* collection) {
  return ThreadStep::Get().Order(roots, *collection, [&] {
    try {
      return run_post_order.As<decltype(&RunPostOrder)>()(self, roots, collection);
    } catch (const std::exception&) {  // such as a deleted buffer; the program's error names the mark
      ThrowIfReadsConsumed(roots);
      throw;
    }
  });
}

void TensorCollectionBarrier(lazy::LazyGraphExecutor* self, Executor::SyncTensorCollection* collection) {
  ThreadStep::Get().PassBarrier(*collection, [self, collection] {
    tensor_collection_barrier.As<decltype(&TensorCollectionBarrier)>()(self, collection);
  });
}

void DeviceBarrier(lazy::LazyGraphExecutor* self, const lazy::BackendDevice& device) {
  GuardBarrier();
  device_barrier.As<decltype(&DeviceBarrier)>()(self, device);
}

void AsyncConstructor(Executor::Async* self, Executor::SyncTensorCollection* collection,
                      std::vector<lazy::BackendDataPtr> parameters, std::vector<lazy::BackendDataPtr> outputs,
                      lazy::LazyGraphExecutor::ComputationCache::TypePtr computation) {
  phases::CheckRun(parameters);
  async_constructor.As<decltype(&AsyncConstructor)>()(self, collection, std::move(parameters), std::move(outputs),
                                                      std::move(computation));
  ThreadStep::Get().Prepare(*self, *collection);
}

std::function<void()> Completer(lazy::MultiWait* self, std::function<void()> run) {
  return completer.As<decltype(&Completer)>()(self, ThreadStep::Get().Start(self, std::move(run)));
}

void MarkStep(void* arena, const lazy::BackendDevice& device) {
  mark_step.As<decltype(&MarkStep)>()(arena, device);
  ThreadStep::Get().End(device);
}

lazy::Value CreateTensorNode(const lazy::LazyTensor* self, const lazy::BackendDataPtr& data, bool read_only) {
  if (Watches(kRegistry)) {
    CheckUse(*self, data.get());
  }
  return create_tensor_node.As<decltype(&CreateTensorNode)>()(self, data, read_only);
}

std::string DeviceToString(const lazy::BackendDevice* self) {
  return DeviceText(*self, device_to_string.As<decltype(&DeviceToString)>());
}

// ---- The table ----

std::vector<Hook> ExecutorHooks() {
  return {
      Row("DeviceContextArena::ForAllDeviceContexts", {abi::kForAllDeviceContexts}, &ForAllDeviceContexts,
          for_all_device_contexts, "a list of live tensors begins"),
      Row("LazyTensor::LazyTensor", {abi::kLazyTensorConstructor}, &LazyTensorConstructor, lazy_tensor_constructor,
          "notes the live tensors"),
      Row("LazyTensor::CurrentDataHandle", {abi::kCurrentDataHandle}, &CurrentDataHandle, current_data_handle,
          "finds reads of donated tensors"),
      Row("LazyGraphExecutor::RunPostOrder", {abi::kRunPostOrder}, &RunPostOrder, run_post_order,
          "chooses the donors of a step"),
      Row("LazyGraphExecutor::DeviceBarrier", {abi::kDeviceBarrier}, &DeviceBarrier, device_barrier,
          "notices a read that needs no run, while a function is traced"),
      Row("LazyGraphExecutor::TensorCollectionBarrier", {abi::kTensorCollectionBarrier}, &TensorCollectionBarrier,
          tensor_collection_barrier, "graph compiled: restores torch_xla's notes on its inputs"),
      Row("LazyGraphExecutor::Async::Async", {abi::kAsyncConstructor}, &AsyncConstructor, async_constructor,
          "the step will run: donors are committed"),
      Row("MultiWait::Completer", {abi::kCompleter}, &Completer, completer, "the step has run: outcomes are read"),
      Row("DeviceContextArena::MarkStep", {abi::kMarkStep}, &MarkStep, mark_step,
          "end of the step: reports unusable donations"),
      Row("LazyTensor::CreateTensorNode", {abi::kCreateTensorNode}, &CreateTensorNode, create_tensor_node,
          "finds ops on donated tensors"),
      Row("BackendDevice::toString", {abi::kDeviceToString}, &DeviceToString, device_to_string,
          "remembers the text, which torch_xla asks for with each output"),
  };
}

}  // namespace

const std::vector<Hook>& HookTable() {
  static const std::vector<Hook> table = [] {
    std::vector<Hook> hooks = ExecutorHooks();
    for (const auto& rows : {FunctionalHooks(), OverwriteHooks()}) {
      hooks.insert(hooks.end(), rows.begin(), rows.end());
    }
    return hooks;
  }();
  return table;
}

}  // namespace torch_xla_donate
