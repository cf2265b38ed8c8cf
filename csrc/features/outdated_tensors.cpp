// The hooks on functionalization, and the notes of base tensors. outdated_tensors.h explains them.
#include "features/outdated_tensors.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <string>
#include <utility>

#include "features/compiled_run.h"
#include "features/use_guard.h"
#include "host/graphs.h"
#include "host/views.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "registry/tallies.h"

namespace torch_xla_donate {

namespace {

using at::FunctionalTensorWrapper;

Original commit_update, view_constructor, copy_tensor_metadata, mutate_view_meta;

bool IsXla(const c10::TensorImpl& tensor) { return tensor.key_set().has(c10::DispatchKey::XLA); }

// If the next step consumes the view's base, the view takes its value now, because it could not be computed later.
void TakeValueFromMarkedBase(FunctionalTensorWrapper& view) {
  if (!view.is_up_to_date() && IsXla(view) && Marks::Get().IsPending(abi::BaseBuffer(view).get())) {
    view.sync_();
  }
}

// The same for a new view of `source`. Torch regards it as out of date once the base has been updated, although it has
// the value of `source`. That may be another view that has outlived the base.
void TakeValue(FunctionalTensorWrapper& view, const FunctionalTensorWrapper& source) {
  const bool is_extracting = IsExtracting();  // the graph must not contain the base as a constant
  if ((!Watches(kRegistry) && !is_extracting) || view.is_up_to_date() || !IsXla(view)) {
    return;
  }
  const lazy::BackendDataPtr base = abi::BaseBuffer(view);
  const bool is_marked = Marks::Get().IsPending(base.get());
  if (source.is_up_to_date() && (is_extracting || is_marked || Steps::Get().IsTracked(base.get()))) {
    abi::SetUpToDate(view);
  } else if (is_marked) {
    view.sync_();
  }
}

// Whether the base could not be found from the view later. Views made in inference mode have no base for autograd, nor
// has the result of detach(), which has the size of the base.
bool HidesBase(const at::Tensor& value, const FunctionalTensorWrapper& base) {
  if (c10::InferenceMode::is_enabled()) {
    return true;
  }
  const c10::TensorImpl& impl = *value.unsafeGetTensorImpl();
  return !impl.has_symbolic_sizes_strides() && !base.has_symbolic_sizes_strides() && impl.sizes() == base.sizes();
}

// Tensors that cannot get their new values keep the old ones, as in stock torch_xla. Their next uses raise again, also
// if a step has consumed what the new value needs. Throws the first exception of a signal handler, after all tensors
// have had their turn.
void GiveNewValues(const std::vector<c10::intrusive_ptr<c10::TensorImpl>>& tensors) {
  std::exception_ptr of_handler;
  for (const auto& tensor : tensors) {
    auto& wrapper = static_cast<FunctionalTensorWrapper&>(*tensor);
    if (!wrapper.isBaseTensor()) {
      continue;
    }
    try {
      wrapper.sync_();
    } catch (const python_error&) {
      if (of_handler == nullptr) {
        of_handler = std::current_exception();
      }
    } catch (const DonatedBufferAccess&) {
    } catch (const std::exception& error) {
      const std::string text =
          "a tensor that was written through a view keeps its old value: " + std::string(error.what());
      Tallies::Get().NoteError(text.c_str());
    }
  }
  if (of_handler != nullptr) {
    std::rethrow_exception(of_handler);
  }
}

// Only advice asks for it, because the stack costs more than the write.
std::shared_ptr<const OutdatedTensors::Write> LineOfWrite(bool is_of_part) noexcept {
  try {
    if (Watches(kInputs)) {
      return std::make_shared<const OutdatedTensors::Write>(
          OutdatedTensors::Write{callbacks::PythonStack(), is_of_part});
    }
  } catch (const std::exception& error) {  // the write itself has worked
    Tallies::Get().NoteError(error.what());
  }
  return nullptr;
}

// ---- The intercepts ----
//
// `meta` refers to the description of a view, whose type differs between versions.

void CommitUpdate(FunctionalTensorWrapper* self) {
  commit_update.As<decltype(&CommitUpdate)>()(self);
  if (Watches(kRegistry) && !self->isBaseTensor() && IsXla(*self) &&
      Steps::Get().IsTracked(abi::BaseBuffer(*self).get())) {
    // The write may need a value that a step has consumed. An error here would lose the later writes of a list of
    // tensors. After these writes functionalization reads the tensor's value, which raises.
    try {
      abi::ApplyLastWrite(*self);
    } catch (const DonatedBufferAccess&) {
    }
  }
  // Notes writes through views even if the program has not donated, because it may donate before the next step.
  if (!self->isBaseTensor() || Watches(kAliases)) {
    OutdatedTensors::Get().NoteWrite(*self);
  }
}

[[gnu::noinline]] void FollowedViewConstructor(FunctionalTensorWrapper* self, const at::Tensor& value,
                                               const FunctionalTensorWrapper* base, const void* meta) {
  view_constructor.As<decltype(&FollowedViewConstructor)>()(self, value, base, meta);
  // After a write that failed, the source has the value that the write would have given.
  if (!base->is_up_to_date() && IsXla(*self)) {
    abi::SetOutOfDate(*self);
  }
  try {
    TakeValue(*self, *base);
    if (HidesBase(value, *base)) {
      OutdatedTensors::Get().NoteBase(*base);
    }
  } catch (...) {
    // The caller of the constructor frees only the memory.
    self->~FunctionalTensorWrapper();
    throw;
  }
}

void ViewConstructor(FunctionalTensorWrapper* self, const at::Tensor& value, const FunctionalTensorWrapper* base,
                     const void* meta) {
  return Watches(kAliases) ? FollowedViewConstructor(self, value, base, meta)
                           : view_constructor.As<decltype(&ViewConstructor)>()(self, value, base, meta);
}

void CopyTensorMetadata(const FunctionalTensorWrapper* source, FunctionalTensorWrapper* copy,
                        const c10::VariableVersion& version, bool allow_change) {
  copy_tensor_metadata.As<decltype(&CopyTensorMetadata)>()(source, copy, version, allow_change);
  if (Watches(kAliases)) {
    if (Watches(kMarks)) {
      TakeValueFromMarkedBase(*copy);
    }
    OutdatedTensors::Get().NoteBase(*source);
    OutdatedTensors::Get().NoteLine(*copy);
  }
}

void MutateViewMeta(FunctionalTensorWrapper* self, const void* meta) {
  mutate_view_meta.As<decltype(&MutateViewMeta)>()(self, meta);
  if (Watches(kMarks)) {
    TakeValueFromMarkedBase(*self);
  }
}

}  // namespace

std::vector<Hook> FunctionalHooks() {
  return {
      Row("FunctionalTensorWrapper::commit_update", {abi::kCommitUpdate}, &CommitUpdate, commit_update,
          "notes the tensors that a write leaves out of date", HookedLibrary::kTorch),
      Row("FunctionalTensorWrapper::FunctionalTensorWrapper", {abi::kViewConstructor[0], abi::kViewConstructor[1]},
          &ViewConstructor, view_constructor, "a view of a marked tensor takes its value", HookedLibrary::kTorch),
      Row("FunctionalTensorWrapper::copy_tensor_metadata", {abi::kCopyTensorMetadata}, &CopyTensorMetadata,
          copy_tensor_metadata, "the same for `.data` of a view", HookedLibrary::kTorch),
      Row("FunctionalTensorWrapper::mutate_view_meta", {abi::kMutateViewMeta[0], abi::kMutateViewMeta[1]},
          &MutateViewMeta, mutate_view_meta, "the same for a view made in place, as by `t_()`", HookedLibrary::kTorch),
  };
}

OutdatedTensors::Tag::Tag(FunctionalTensorWrapper& owner)
    : tensor(&owner), storage(owner.storage().unsafeGetStorageImpl()), device(owner.device()) {}

c10::intrusive_ptr<c10::BackendMeta> OutdatedTensors::Tag::clone(const c10::intrusive_ptr<c10::BackendMeta>&) const {
  return {};
}

c10::intrusive_ptr<c10::TensorImpl> OutdatedTensors::Lock(const Tag& tag) {
  // The memory exists as long as the tag, whose destructor waits for the mutex. The tensor may be in destruction.
  auto weak = c10::weak_intrusive_ptr<c10::TensorImpl>::reclaim(tag.tensor);
  auto tensor = weak.lock();
  weak.release();
  return tensor;
}

void OutdatedTensors::NoteBase(const FunctionalTensorWrapper& base) {
  if (!base.isBaseTensor() || !IsXla(base)) {
    return;
  }
  // Torch passes the tensor as const, but made it as a variable one. Its value does not change here.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  auto& impl = const_cast<FunctionalTensorWrapper&>(base);
  const c10::StorageImpl* storage = base.storage().unsafeGetStorageImpl();
  c10::intrusive_ptr<Tag> made;  // if noting it fails, released without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (c10::BackendMeta* found = impl.get_backend_meta()) {
    // `t.data = other` has given the tensor another storage. Metadata of another class is not ours to change.
    if (auto* tag = dynamic_cast<Tag*>(found); tag != nullptr && tag->storage != storage) {
      auto entry = bases_.extract(FindBase(*tag));
      entry.key() = tag->storage = storage;
      bases_.insert(std::move(entry));
    }
    return;
  }
  if (outdated_.capacity() <= bases_.size()) {
    outdated_.reserve(2 * bases_.size() + 16);
  }
  made = c10::make_intrusive<Tag>(impl);
  bases_.emplace(storage, made.get());
  impl.set_backend_meta(made);
}

void OutdatedTensors::NoteWrite(FunctionalTensorWrapper& written) {
  if (!IsXla(written) || written.storage().use_count() == 1) {
    return;
  }
  if (!written.isBaseTensor()) {
    const at::TensorBase view(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&written));
    const c10::TensorImpl* base = view.is_view() ? view._base().unsafeGetTensorImpl() : nullptr;
    if (base != nullptr && base->key_set().has(c10::DispatchKey::Functionalize)) {
      NoteBase(static_cast<const FunctionalTensorWrapper&>(*base));
    }
  }
  const auto line = LineOfWrite(/*is_of_part=*/!written.isBaseTensor());
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> outdated;  // released without the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [begin, end] = bases_.equal_range(written.storage().unsafeGetStorageImpl());
    outdated.reserve(static_cast<std::size_t>(std::distance(begin, end)));
    for (auto it = begin; it != end; ++it) {
      Tag& tag = *it->second;
      tag.last_write = line != nullptr ? line : tag.last_write;
      if (tag.tensor == &written || tag.place != kUpToDate) {
        continue;
      }
      tag.place = outdated_.size();
      outdated_.push_back(&tag);
      has_outdated_.store(true, std::memory_order_relaxed);
      if (auto tensor = Lock(tag)) {
        outdated.push_back(std::move(tensor));
      }
    }
  }
  // A view operation begins with the tensor's current value, which a step may have consumed. The write, such as one of
  // a new value into `t.data`, has given the storage another value.
  const auto has_value = [](const c10::intrusive_ptr<c10::TensorImpl>& tensor) {
    const auto& wrapper = static_cast<const FunctionalTensorWrapper&>(*tensor);
    return !Watches(kRegistry) || !Steps::Get().IsTracked(abi::BufferOfValue(wrapper.value()).get());
  };
  outdated.erase(std::remove_if(outdated.begin(), outdated.end(), has_value), outdated.end());
  GiveNewValues(outdated);
}

void OutdatedTensors::NoteLine(FunctionalTensorWrapper& replaced) {
  auto* tag = dynamic_cast<Tag*>(replaced.get_backend_meta());
  if (const auto line = tag == nullptr ? nullptr : LineOfWrite(/*is_of_part=*/false)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tag->last_write = line;
  }
}

std::shared_ptr<const OutdatedTensors::Write> OutdatedTensors::LastWrite(const at::TensorBase& tensor) const {
  const auto* tag = dynamic_cast<const Tag*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  const std::lock_guard<std::mutex> lock(mutex_);
  return tag == nullptr ? nullptr : tag->last_write;
}

void OutdatedTensors::BringUpToDate(const lazy::BackendDevice* device) {
  if (!has_outdated_.load(std::memory_order_relaxed)) {
    return;
  }
  std::optional<at::Device> wanted;
  if (device != nullptr) {
    wanted = abi::TorchDevice(*device);
  }
  // Released without the lock: the last owner of a tensor may take the GIL, and the tag's destructor takes the lock.
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> tensors;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tensors.reserve(outdated_.size());
    std::size_t kept = 0;
    for (Tag* tag : outdated_) {
      if (wanted.has_value() && tag->device != *wanted) {
        tag->place = kept;
        outdated_[kept++] = tag;
        continue;
      }
      tag->place = kUpToDate;
      if (auto tensor = Lock(*tag)) {
        tensors.push_back(std::move(tensor));
      }
    }
    outdated_.resize(kept);
    has_outdated_.store(kept > 0, std::memory_order_relaxed);
  }
  GiveNewValues(tensors);
}

std::unordered_set<const abi::TensorData*> OutdatedTensors::OldValues() const {
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> tensors;  // released without the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tensors.reserve(outdated_.size());
    for (const Tag* tag : outdated_) {
      if (auto tensor = Lock(*tag)) {
        tensors.push_back(std::move(tensor));
      }
    }
  }
  std::unordered_set<const abi::TensorData*> found;
  for (const auto& tensor : tensors) {
    const auto& wrapper = static_cast<const FunctionalTensorWrapper&>(*tensor);
    if (wrapper.isBaseTensor() && !wrapper.is_up_to_date()) {
      found.insert(abi::ValueOf(wrapper));
    }
  }
  return found;
}

OutdatedTensors::Bases::iterator OutdatedTensors::FindBase(const Tag& tag) {
  const auto [begin, end] = bases_.equal_range(tag.storage);
  const auto found = std::find_if(begin, end, [&tag](const auto& entry) { return entry.second == &tag; });
  return found == end ? bases_.end() : found;
}

void OutdatedTensors::Forget(const Tag& tag) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = FindBase(tag); found != bases_.end()) {  // else noting it has failed
    bases_.erase(found);
  }
  if (tag.place != kUpToDate) {
    outdated_.back()->place = tag.place;
    outdated_[tag.place] = outdated_.back();
    outdated_.pop_back();
    has_outdated_.store(!outdated_.empty(), std::memory_order_relaxed);
  }
}

OutdatedTensors::Counts OutdatedTensors::Size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {bases_.size(), outdated_.size()};
}

}  // namespace torch_xla_donate
