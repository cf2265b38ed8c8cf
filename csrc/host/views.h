// Functionalization: a base tensor and its views share a storage, which notes the writes that each must apply.
//
// Threads: any thread may call all functions, with or without the GIL.
#pragma once

#include <vector>

#include "host/symbols.h"
#include "host/tensors.h"

namespace torch_xla_donate::abi {

// The buffer of a storage's base tensor, without the writes noted since. Null if not computed yet or not torch_xla's.
lazy::BackendDataPtr BaseBuffer(const at::FunctionalTensorWrapper& tensor);
lazy::BackendDataPtr BaseBuffer(const at::Tensor& tensor);
// Declares the tensor's value up to date with its storage, so that torch does not compute it again.
void SetUpToDate(at::FunctionalTensorWrapper& tensor);
// The opposite: torch computes it at the next use.
void SetOutOfDate(at::FunctionalTensorWrapper& tensor);
// Applies the storage's last noted write to the base. If that fails, the storage and the other views are unchanged, and
// the next use of `written` or of an alias of it raises, too.
void ApplyLastWrite(at::FunctionalTensorWrapper& written);
// The same as SetUpToDate for any resolved tensor.
void KeepValue(const at::Tensor& tensor);

// The data of the tensor's own value. For a base tensor also that of its storage, which has the writes since, and which
// torch computes the tensor's next value from. Empty if it is not a tensor of torch_xla.
std::vector<const TensorData*> ValuesOf(const at::Tensor& tensor);

// The buffer that a tensor holds, or, for a view that is out of date, the buffer it will be computed from. Null if it
// has neither. Computes nothing, unlike Resolve().
lazy::BackendDataPtr BufferBehind(const at::Tensor& tensor);

// The tensor that a mark donates: the base in place of a view that is out of date and has each element of the base
// once, such as a reshape; else the tensor. Torch computes such a view again from its base at the next use.
at::Tensor TensorToDonate(const at::Tensor& tensor);
// The buffer of that mark, also after a use of the view; null if there is none. Computes nothing.
lazy::BackendDataPtr BufferToDonate(const at::Tensor& tensor);

// Whether views of the tensor may exist, or other tensors share its storage. False without functionalization.
bool HasAliases(const at::Tensor& tensor);

// Makes every view of the tensor recompute its value from the tensor at its next use. A view computed earlier has a
// separate buffer in torch_xla and would not notice that its base is gone. Does nothing for a view, or without
// functionalization.
void InvalidateViews(const at::Tensor& tensor);

}  // namespace torch_xla_donate::abi
