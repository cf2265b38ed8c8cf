// Reads and changes functionalization's state.
#include "host/views.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/lazy/backend/backend_interface.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "host/layouts.h"
#include "host/tensors.h"

namespace torch_xla_donate::abi {

namespace {

using Group = at::functionalization::FunctionalStorageImpl;

// The counter that is_up_to_date() compares, and a storage's noted updates, are private. An explicit instantiation may
// name private members.
struct Private {
  friend std::size_t& CounterOf(Private, at::FunctionalTensorWrapper& tensor);
  friend void DropLastWrite(Private, Group& group);
};
template <auto counter, auto updates, auto generation>
struct Open {
  friend std::size_t& CounterOf(Private, at::FunctionalTensorWrapper& tensor) { return tensor.*counter; }
  friend void DropLastWrite(Private, Group& group) {
    (group.*updates).pop_back();
    --(group.*generation);
  }
};
template struct Open<&at::FunctionalTensorWrapper::generation_, &Group::updates_, &Group::generation_>;

Group& GroupOf(const at::FunctionalTensorWrapper& tensor) {
  return static_cast<Group&>(*tensor.storage().unsafeGetStorageImpl());
}

// A view, computed from its base. torch 2.8 has a member for this, 2.9 shows the notes of the view.
template <typename View>
auto Replay(View& view, const at::Tensor& base) -> decltype(view.apply_view_metas(base)) {
  return view.apply_view_metas(base);
}
template <typename View>
auto Replay(const View& view, at::Tensor computed) -> std::enable_if_t<sizeof(view.view_metas()) != 0, at::Tensor> {
  for (const auto& meta : view.view_metas()) {
    computed = meta->forward(computed);
  }
  return computed;
}

// Whether a view has each element of its base once: torch_xla computes it by reshapes and permutations only. An equal
// number of elements does not show it, as t[:1].expand(24) and t.unfold(0, 2, 1) have repeated ones.
bool RearrangesBase(at::FunctionalTensorWrapper& view) {
  const at::Tensor base = GroupOf(view).base();
  if (view.isBaseTensor() || base.numel() != view.numel() ||
      base.scalar_type() != c10::typeMetaToScalarType(view.dtype())) {
    return false;
  }
  const lazy::BackendDataPtr buffer = BufferOfValue(base);
  if (buffer == nullptr) {
    return false;
  }
  const at::AutoDispatchSkipFunctionalize guard;
  const at::Tensor computed = Replay(view, base);
  const TensorData* data = ValueOf(*computed.unsafeGetTensorImpl());
  const lazy::Node* node = data == nullptr ? nullptr : data->ir_value.node.get();
  static const std::array<lazy::OpKind, 4> rearranging = {lazy::OpKind(at::aten::view), lazy::OpKind(at::aten::permute),
                                                          lazy::OpKind(at::aten::squeeze),
                                                          lazy::OpKind(at::aten::unsqueeze)};
  while (node != nullptr && node->operands().size() == 1 &&
         std::find(rearranging.begin(), rearranging.end(), node->op()) != rearranging.end()) {
    node = node->operand(0).node;
  }
  return node != nullptr && lazy::getBackend()->GetComputationDataFromNode(node) == buffer;
}

}  // namespace

void SetUpToDate(at::FunctionalTensorWrapper& tensor) { CounterOf(Private(), tensor) = GroupOf(tensor).generation(); }

void SetOutOfDate(at::FunctionalTensorWrapper& tensor) {
  CounterOf(Private(), tensor) = GroupOf(tensor).generation() - 1;
}

void ApplyLastWrite(at::FunctionalTensorWrapper& written) {
  Group& group = GroupOf(written);
  try {
    group.apply_updates();
  } catch (...) {
    DropLastWrite(Private(), group);
    SetOutOfDate(written);  // it has the value of the dropped write
    throw;
  }
}

void KeepValue(const at::Tensor& tensor) {
  if (at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor)) {
    SetUpToDate(*wrapper);
  }
}

lazy::BackendDataPtr BaseBuffer(const at::FunctionalTensorWrapper& tensor) {
  return BufferOfValue(GroupOf(tensor).base());
}

lazy::BackendDataPtr BaseBuffer(const at::Tensor& tensor) {
  const at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor);
  return wrapper == nullptr ? nullptr : BaseBuffer(*wrapper);
}

std::vector<const TensorData*> ValuesOf(const at::Tensor& tensor) {
  std::vector<const TensorData*> found;
  const auto add = [&found](const at::Tensor& value) {
    if (const TensorData* data = ValueOf(*value.unsafeGetTensorImpl()); data != nullptr) {
      found.push_back(data);
    }
  };
  add(tensor);
  const at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor);
  if (wrapper != nullptr && wrapper->isBaseTensor()) {
    add(GroupOf(*wrapper).base());
  }
  return found;
}

lazy::BackendDataPtr BufferBehind(const at::Tensor& tensor) {
  const at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor);
  return wrapper != nullptr && !wrapper->is_up_to_date() ? BaseBuffer(*wrapper) : Resolve(tensor).buffer;
}

at::Tensor TensorToDonate(const at::Tensor& tensor) {
  at::FunctionalTensorWrapper* view = WrapperOf(tensor);
  if (view != nullptr && !view->is_up_to_date()) {
    GroupOf(*view).apply_updates();
    if (RearrangesBase(*view)) {
      return GroupOf(*view).base();
    }
  }
  return tensor;
}

lazy::BackendDataPtr BufferToDonate(const at::Tensor& tensor) {
  at::FunctionalTensorWrapper* view = WrapperOf(tensor);
  const bool is_own = view == nullptr || view->isBaseTensor() || view->is_up_to_date();
  lazy::BackendDataPtr own = is_own ? BufferBehind(tensor) : nullptr;
  return own == nullptr && view != nullptr && RearrangesBase(*view) ? BaseBuffer(*view) : own;
}

bool HasAliases(const at::Tensor& tensor) {
  const at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor);
  return wrapper != nullptr && wrapper->storage().use_count() > 1;
}

void InvalidateViews(const at::Tensor& tensor) {
  if (!HasAliases(tensor)) {
    return;
  }
  const at::FunctionalTensorWrapper* wrapper = WrapperOf(tensor);
  // A tensor and its views share a storage. Replacing the base by the same tensor makes the views out of date. It is
  // replaced at once: torch.compile computes even an up-to-date view again if a storage has updates that wait.
  const at::Tensor base = GroupOf(*wrapper).base();
  if (base.unsafeGetTensorImpl() == wrapper->value().unsafeGetTensorImpl()) {
    GroupOf(*wrapper).add_update(base, {});
    GroupOf(*wrapper).apply_updates();
  }
}

}  // namespace torch_xla_donate::abi
