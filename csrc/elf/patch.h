// Redirects one library's calls of one function, made through slots, to a replacement while the object lives.
//
// Ownership: a GotPatch owns only what it has put into the slots. The patched library must stay loaded until the patch
//   is undone. `*original` and the replacement's code must outlive every call, because a thread may still run the
//   replacement after Undo(). Undo() therefore never resets `*original`. Use static storage in a permanently loaded
//   library.
// Threads: other threads may call through the slots meanwhile. Each slot changes by one aligned atomic 8-byte exchange,
//   so a call reaches either the function or the replacement. `*original` is set before the first exchange. The slots
//   change one after another, so for a moment the patch intercepts only some calls. Any thread may install and undo,
//   under one lock for the process, since patches may share a page. One object belongs to one thread at a time. A
//   process that was forked while another thread installed or undid a patch must do neither.
// Memory: a read-only page becomes writable only for the exchange, then gets back the protection that /proc/self/maps
//   showed just before. Writable pages keep their protection. If the kernel refuses to remove the write permission,
//   installing fails and undoing leaves the page writable.
// Not reached: copies of the function's address made earlier, and slots of other libraries.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "elf/image.h"

namespace torch_xla_donate {

// One function to intercept, and its replacement.
struct PatchSpec {
  std::string symbol;                      // mangled name of the imported function
  void* expected = nullptr;                // the function that the dynamic linker must have put into the slots
  void* replacement = nullptr;             // has the same signature; with a member function, `this` comes first
  std::atomic<void*>* original = nullptr;  // receives `expected`, for the replacement to call
};

class GotPatch {
 public:
  // Replaces the contents of all `slots`, which must be those of `spec.symbol` in `image`.
  //
  // A JUMP_SLOT that points into the image itself is not bound yet: until the first call it leads to the library's own
  // PLT. The constructor treats it as if it held `expected`. Undo() restores the PLT address, and the next call binds
  // the slot as usual. A thread that is binding such a slot may write `expected` over the replacement; InPlace() shows
  // that. Libraries linked with `-z now` do not have this race.
  //
  // Throws std::invalid_argument for a null pointer in `spec`, and std::runtime_error if
  //   - `slots` is empty,
  //   - a slot holds another function than expected; then nothing has changed, not even `*original`,
  //   - a slot is not aligned; then nothing has changed,
  //   - a page cannot be made writable or read-only again. Then the slots are restored, and if some cannot be, the text
  //     says how many. `*original` stays set, because a thread may have entered the replacement.
  GotPatch(const ElfImage& image, const PatchSpec& spec, const std::vector<RelocationSlot>& slots);

  // Undoes the patch. Slots that Undo() would count stay unchanged.
  ~GotPatch();

  GotPatch(GotPatch&& other) noexcept = default;
  GotPatch& operator=(GotPatch&&) = delete;

  // Restores the slots and returns how many it could not restore. Such a slot lies in a page that can no longer be
  // written, or holds a pointer that another patch has put there later. That patch may call ours, so Undo() leaves its
  // pointer. A repeated call retries only these slots. Once the other patch has restored ours, Undo() leaves no trace.
  [[nodiscard]] std::size_t Undo() noexcept;

  // How many slots lead to the replacement now; SlotCount() unless another patch or the linker has changed some.
  std::size_t InPlace() const noexcept;

  // How many slots were patched; 0 for a moved-from object.
  std::size_t SlotCount() const noexcept { return slots_.size(); }

 private:
  struct PatchedSlot {
    void** address;
    void* before;    // restored by Undo(): `expected`, or the address in the PLT
    int protection;  // of the page, as last read; Undo() uses it if /proc cannot be read
    bool settled;    // the slot does not hold the replacement: not yet, or no longer
  };

  GotPatch() = default;
  void Install(const ElfImage& image, const PatchSpec& spec, const std::vector<RelocationSlot>& slots);

  void* expected_ = nullptr;
  void* replacement_ = nullptr;
  std::vector<PatchedSlot> slots_;
};

// Installs all patches or none, in one pass over the image's relocations. Throws as the constructor does, after it has
// undone the patches installed so far. Calls made meanwhile may have been intercepted.
std::vector<GotPatch> InstallAll(const ElfImage& image, const std::vector<PatchSpec>& specs);

}  // namespace torch_xla_donate
