// Functionalization: a base tensor and its views share a storage, which notes the writes that each has to follow.
//
// Threads: all functions may be called from any thread, with or without the GIL.
#pragma once

#include "host/symbols.h"

namespace torch_xla_donate::abi {

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

// The buffer that a tensor holds, or from which it will be computed when it is used, if it is a view that is out of
// date; null if there is none. Computes nothing, unlike Resolve().
lazy::BackendDataPtr BufferBehind(const at::Tensor& tensor);

// Makes every view of the tensor compute itself anew, from the tensor, when it is used next. A view that was computed
// before has a buffer of its own in torch_xla, and would not notice that its base is gone. Does nothing without
// functionalization, and to a tensor that is a view itself.
void InvalidateViews(const at::Tensor& tensor);

}  // namespace torch_xla_donate::abi
