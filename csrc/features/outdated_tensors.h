// The hooks on torch's functionalization, by which torch_xla has views. They find the tensors that a write leaves out
// of date, and the views that must take their value before a step consumes their base.
//
// A tensor and its views share a storage, which keeps the value of the base. After `t[0] = x` the storage has the new
// value, but the base tensor t keeps the old one until the program uses t again. Nothing can read that old value, but
// it is alive: it would be an output of the step, or keep a buffer from being donated. So OutdatedTensors notes the
// base at the write. A step that may donate gives it the new value before torch_xla lists the live tensors. This
// applies no operation, because the storage already has the value.
//
// Torch computes a view from its base again when the program uses it after a write or a mark. For a view made between a
// mark and the step this is too late, because the step consumes the base. Such a view takes its value when it is made,
// and is then an output of the step.
//
// Ownership: base tensors are noted by address. Each carries a tag that removes the note with the tensor.
// Threads: the hooks run on any thread, with or without the GIL. OutdatedTensors never releases a tensor under its
//   mutex.
// Errors: a hook passes on torch's error while a view takes its value, at the line that makes the view.
#pragma once

#include <ATen/FunctionalTensorWrapper.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "host/never_destroyed.h"
#include "host/process_mutex.h"
#include "host/symbols.h"
#include "registry/watch.h"
#include "step/callbacks.h"
#include "step/hooks.h"

namespace torch_xla_donate {

// The rows of the table of hooks that this file implements.
std::vector<Hook> FunctionalHooks();

class OutdatedTensors {
 public:
  static OutdatedTensors& Get() { return NeverDestroyed<OutdatedTensors>(); }

  // From now on also notes the base of each new alias. After a write in inference mode, or through `t.data` or
  // `t.detach()`, the base cannot be found from the written tensor. Called at a program's first donation; before, only
  // writes through views are noted.
  static void FollowAliases() { SetWatch(kAliases, kAliases); }

  // An alias of the tensor is being made. Does nothing unless the tensor is a base of torch_xla.
  void NoteBase(const at::FunctionalTensorWrapper& base);
  // The storage that `written` shares with its aliases has a new value. Aliases of a consumed value take it at once,
  // the others in BringUpToDate().
  void NoteWrite(at::FunctionalTensorWrapper& written);
  // Gives the outdated tensors of a device their new values. A tensor that cannot get its new value stays outdated, and
  // its next use raises. Throws only the exceptions of signal handlers.
  void BringUpToDate(const lazy::BackendDevice* device);

  // The last write of a tensor through an alias, or by `t.data = x`, while advice watches the program.
  struct Write {
    std::vector<StackFrame> stack;  // innermost first
    bool is_of_part;                // through a view, as in `t[i] = x`
  };
  // A tensor gets the value of another one. Does nothing for a new tensor, such as `t.detach()`.
  void NoteLine(at::FunctionalTensorWrapper& replaced);
  // Null if there is none.
  std::shared_ptr<const Write> LastWrite(const at::TensorBase& tensor) const;

  // The values of outdated tensors, which nothing can read any more. Only for comparison.
  std::unordered_set<const abi::TensorData*> OldValues() const;

  // How many base tensors are noted, and how many of these may be out of date.
  struct Counts {
    std::size_t bases, outdated;
  };
  Counts Size() const;

 private:
  static constexpr std::size_t kUpToDate = std::numeric_limits<std::size_t>::max();

  // The metadata of a noted tensor. Torch destroys it with the tensor, or when the tensor becomes another one. A weak
  // pointer instead would keep the tensor's contents, and torch.utils.swap_tensors refuses tensors that have one.
  struct Tag : c10::BackendMeta {
    explicit Tag(at::FunctionalTensorWrapper& owner);
    ~Tag() override { Get().Forget(*this); }
    // A copy of the tensor is not noted.
    c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override;

    at::FunctionalTensorWrapper* tensor;
    const c10::StorageImpl* storage;  // compared only, never dereferenced
    at::Device device;
    std::size_t place = kUpToDate;  // in `outdated_`
    std::shared_ptr<const Write> last_write;
  };

  // The tensor, if it is alive. Call it with the mutex, but release the tensor without it. So a thread that owns such
  // tensors allocates nothing before it has released the mutex: the exception would release the tensors first.
  static c10::intrusive_ptr<c10::TensorImpl> Lock(const Tag& tag);
  void Forget(const Tag& tag);
  using Bases = std::unordered_multimap<const c10::StorageImpl*, Tag*>;
  Bases::iterator FindBase(const Tag& tag);

  std::mutex& mutex_ = ProcessMutex(MutexOf::kOutdatedTensors);
  Bases bases_;                 // by storage
  std::vector<Tag*> outdated_;  // has room for all bases
  std::atomic<bool> has_outdated_{false};
};

}  // namespace torch_xla_donate
