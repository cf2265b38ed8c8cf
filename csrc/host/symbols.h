// The functions of torch_xla and libtorch that the hooks replace: mangled names and types.
//
// third_party/host_facts.md lists the versions in which each name was compared.
#pragma once

#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/lazy/core/lazy_graph_executor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch_xla_donate {

namespace lazy = torch::lazy;

namespace abi {

using TensorData = lazy::LazyTensor::Data;
using DeviceDataInfo = lazy::LazyGraphExecutor::DeviceDataInfo;

// The executor's nested types are protected, so only a derived class can name them.
struct Executor : lazy::LazyGraphExecutor {
  using LazyGraphExecutor::Async;
  using LazyGraphExecutor::DeviceContextArena;
  using LazyGraphExecutor::PostOrderData;
  using LazyGraphExecutor::SyncTensorCollection;

  // Calls torch's own function, even while hooks are installed.
  void PassBarrier(SyncTensorCollection* collection) { LazyGraphExecutor::TensorCollectionBarrier(collection); }
};

// Imported under these names by the wheels of 2.8.1 and 2.9.0.
inline constexpr const char* kRunPostOrder =
    "_ZN5torch4lazy17LazyGraphExecutor12RunPostOrderERKSt6vectorINS0_5ValueESaIS3_EEPNS1_20SyncTensorCollectionE";
inline constexpr const char* kAsyncConstructor =
    "_ZN5torch4lazy17LazyGraphExecutor5AsyncC2EPNS1_20SyncTensorCollectionESt6vectorISt10shared_ptrINS0_11BackendDataEE"
    "SaIS8_EESA_S6_INS1_17CachedComputationEE";
inline constexpr const char* kLazyTensorConstructor = "_ZN5torch4lazy10LazyTensorC2ESt10shared_ptrINS1_4DataEE";
inline constexpr const char* kCurrentDataHandle = "_ZNK5torch4lazy10LazyTensor17CurrentDataHandleEv";
inline constexpr const char* kCreateTensorNode =
    "_ZNK5torch4lazy10LazyTensor16CreateTensorNodeERKSt10shared_ptrINS0_11BackendDataEEb";
inline constexpr const char* kForAllDeviceContexts =
    "_ZN5torch4lazy17LazyGraphExecutor18DeviceContextArena20ForAllDeviceContextsERKSt8functionIFvPNS2_13DeviceContextEE"
    "EPKNS0_13BackendDeviceE";
inline constexpr const char* kDeviceBarrier = "_ZN5torch4lazy17LazyGraphExecutor13DeviceBarrierERKNS0_13BackendDeviceE";
inline constexpr const char* kTensorCollectionBarrier =
    "_ZN5torch4lazy17LazyGraphExecutor23TensorCollectionBarrierEPNS1_20SyncTensorCollectionE";
inline constexpr const char* kMarkStep =
    "_ZN5torch4lazy17LazyGraphExecutor18DeviceContextArena8MarkStepERKNS0_13BackendDeviceE";
inline constexpr const char* kCompleter = "_ZN5torch4lazy9MultiWait9CompleterESt8functionIFvvEE";
inline constexpr const char* kDeviceToString = "_ZNK5torch4lazy13BackendDevice8toStringB5cxx11Ev";
inline constexpr const char* kCommitUpdate = "_ZN2at23FunctionalTensorWrapper13commit_updateEv";
inline constexpr const char* kViewConstructor[2] = {
    "_ZN2at23FunctionalTensorWrapperC1ERKNS_6TensorEPKS0_RKSt10shared_ptrINS_17functionalization8ViewMetaEE",
    "_ZN2at23FunctionalTensorWrapperC1ERKNS_6TensorEPKS0_RKNS_17functionalization8ViewMetaE"};
inline constexpr const char* kCopyTensorMetadata =
    "_ZN2at23FunctionalTensorWrapper20copy_tensor_metadataEPKS0_PS0_RKN3c1015VariableVersionEb";
inline constexpr const char* kMutateViewMeta[2] = {
    "_ZN2at23FunctionalTensorWrapper16mutate_view_metaERKSt10shared_ptrINS_17functionalization8ViewMetaEE",
    "_ZN2at23FunctionalTensorWrapper16mutate_view_metaERKNS_17functionalization8ViewMetaE"};

}  // namespace abi

}  // namespace torch_xla_donate
