// Reads and changes functionalization's state.
#include "host/views.h"

#include "host/layouts.h"
#include "host/tensors.h"

namespace torch_xla_donate::abi {

namespace {

// The counter that is_up_to_date() compares is private. An explicit instantiation may name private members.
struct Generation {
  friend std::size_t& CounterOf(Generation, at::FunctionalTensorWrapper& tensor);
};
template <std::size_t at::FunctionalTensorWrapper::* member>
struct Open {
  friend std::size_t& CounterOf(Generation, at::FunctionalTensorWrapper& tensor) { return tensor.*member; }
};
template struct Open<&at::FunctionalTensorWrapper::generation_>;

// The same for a storage's noted updates.
using Group = at::functionalization::FunctionalStorageImpl;
struct Noted {
  friend void DropLastWrite(Noted, Group& group);
};
template <auto updates, auto generation>
struct OpenNoted {
  friend void DropLastWrite(Noted, Group& group) {
    (group.*updates).pop_back();
    --(group.*generation);
  }
};
template struct OpenNoted<&Group::updates_, &Group::generation_>;

Group& GroupOf(const at::FunctionalTensorWrapper& tensor) {
  return static_cast<Group&>(*tensor.storage().unsafeGetStorageImpl());
}

lazy::BackendDataPtr BufferOfImpl(const c10::TensorImpl& impl) {
  const lazy::LazyTensorPtr* tensor = LazyTensorOf(impl);
  return tensor == nullptr || *tensor == nullptr ? nullptr : BufferOf(*(*tensor)->data());
}

}  // namespace

void SetUpToDate(at::FunctionalTensorWrapper& tensor) {
  CounterOf(Generation(), tensor) = GroupOf(tensor).generation();
}

void SetOutOfDate(at::FunctionalTensorWrapper& tensor) {
  CounterOf(Generation(), tensor) = GroupOf(tensor).generation() - 1;
}

void ApplyLastWrite(at::FunctionalTensorWrapper& written) {
  Group& group = GroupOf(written);
  try {
    group.apply_updates();
  } catch (...) {
    DropLastWrite(Noted(), group);
    SetOutOfDate(written);  // it has the value of the dropped write
    throw;
  }
}

void KeepValue(const at::Tensor& tensor) {
  if (at::functionalization::impl::isFunctionalTensor(tensor)) {
    SetUpToDate(*at::functionalization::impl::unsafeGetFunctionalWrapper(tensor));
  }
}

lazy::BackendDataPtr BaseBuffer(const at::FunctionalTensorWrapper& tensor) {
  return BufferOfImpl(*GroupOf(tensor).base().unsafeGetTensorImpl());
}

lazy::BackendDataPtr ValueBuffer(const at::FunctionalTensorWrapper& tensor) {
  return BufferOfImpl(*tensor.value().unsafeGetTensorImpl());
}

std::vector<const TensorData*> ValuesOf(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  std::vector<const TensorData*> found;
  const auto add = [&found](const at::Tensor& value) {
    if (const TensorData* data = ValueOf(*value.unsafeGetTensorImpl()); data != nullptr) {
      found.push_back(data);
    }
  };
  add(tensor);
  if (functional::isFunctionalTensor(tensor)) {
    const at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(tensor);
    if (wrapper->isBaseTensor()) {
      add(GroupOf(*wrapper).base());
    }
  }
  return found;
}

lazy::BackendDataPtr BufferBehind(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  if (functional::isFunctionalTensor(tensor)) {
    const at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(tensor);
    if (!wrapper->is_up_to_date()) {
      return BaseBuffer(*wrapper);
    }
  }
  return Resolve(tensor).buffer;
}

void InvalidateViews(const at::Tensor& tensor) {
  namespace functional = at::functionalization::impl;
  if (!functional::isFunctionalTensor(tensor)) {
    return;
  }
  const at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(tensor);
  if (wrapper->storage().use_count() == 1) {
    return;
  }
  // A tensor and its views share a storage. Replacing the base by the same tensor makes the views out of date.
  const at::Tensor base = GroupOf(*wrapper).base();
  if (base.unsafeGetTensorImpl() == wrapper->value().unsafeGetTensorImpl()) {
    GroupOf(*wrapper).add_update(base, {});
  }
}

}  // namespace torch_xla_donate::abi
