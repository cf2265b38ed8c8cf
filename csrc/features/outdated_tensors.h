// The hooks on torch's functionalization, by which torch_xla has views: which tensors a write has left out of date, and
// which views must take their value before a step consumes their base.
//
// A tensor and its views share a storage, and the storage keeps the value of the base. After `t[0] = x` the storage has
// the new value, while the base tensor t keeps its old one until the program uses t again. Nothing can read that old
// value, but it is alive: it would be an output of the step, or keep a buffer from being donated. So OutdatedTensors
// notes the base at the write, and a step that may donate gives it the new value before torch_xla lists the live
// tensors. This applies no operation: the value is in the storage already.
//
// A view is worked out again from its base when the program uses it after a write, and after a mark. That is too late
// for a view that is made between a mark and the step: the step consumes the base. Such a view takes its value when it
// is made, and is an output of the step then.
//
// Ownership: base tensors are noted by address; each carries a tag that ends the note with the tensor.
// Threads: the hooks run on any thread, with or without the GIL. OutdatedTensors has one mutex, and holds it while it
//   lets go of no tensor.
// Errors: a hook passes on what torch throws while a view takes its value: that is the line that makes the view.
#pragma once

#include <ATen/FunctionalTensorWrapper.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "host/symbols.h"
#include "step/hooks.h"
#include "step/watch.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// The rows of the table of hooks that this file implements.
std::vector<Hook> FunctionalHooks();

class OutdatedTensors {
 public:
  // Never destroyed: hooks may run until the process ends.
  static OutdatedTensors& Get();

  // From now on the base of each new alias is noted, too: what a write in inference mode, or through `t.data` or
  // `t.detach()`, leaves out of date cannot be found from the tensor that was written. Called where a program first
  // donates; a program that never does pays one relaxed load.
  static void FollowAliases() { SetWatch(kAliases, kAliases); }

  // An alias of the tensor is being made. Does nothing unless the tensor is a base of torch_xla's.
  void NoteBase(const at::FunctionalTensorWrapper& base);
  // The storage that `written` shares with its aliases has got another value. An alias of a consumed value takes the
  // new one at once; all others wait for BringUpToDate().
  void NoteWrite(at::FunctionalTensorWrapper& written);
  // The tensors of a device that are out of date take their new values. A tensor whose new value cannot be had stays
  // as it is: the next use of it raises. Throws only what a signal's handler has raised.
  void BringUpToDate(const lazy::BackendDevice* device);

  // How many base tensors are noted, and how many of them may be out of date.
  struct Counts {
    std::size_t bases, outdated;
  };
  Counts Size() const;

 private:
  OutdatedTensors();

  // What a noted tensor carries, and takes along when it is destroyed or becomes another one. No weak pointer:
  // torch.utils.swap_tensors refuses a tensor that has one, and it would keep what the tensor holds.
  struct Tag : c10::BackendMeta {
    explicit Tag(const at::FunctionalTensorWrapper& owner);
    ~Tag() override { Get().Forget(*this); }
    // Whatever is made of the tensor is not noted.
    c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override;

    at::FunctionalTensorWrapper* tensor;
    const c10::StorageImpl* storage;  // for comparing, never followed
    at::Device device;
    bool outdated = false;  // perhaps: it is among `outdated_`
  };

  // The tensor, if it is alive. Call with the mutex, and let go of the tensor without it.
  static c10::intrusive_ptr<c10::TensorImpl> Lock(const Tag& tag);
  void Forget(const Tag& tag);
  void RemoveBase(const Tag& tag);

  mutable std::mutex mutex_;
  std::unordered_multimap<const c10::StorageImpl*, Tag*> bases_;  // by storage
  std::vector<Tag*> outdated_;
  std::atomic<bool> has_outdated_{false};
};

}  // namespace torch_xla_donate
