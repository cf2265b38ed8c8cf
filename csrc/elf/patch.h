// Sends the calls of one library to one function that it calls through slots elsewhere, for as long as an object lives.
//
// Ownership: a GotPatch owns what it has put into the slots and nothing else. It points into the patched library, which
//   must stay loaded until the patch is undone. `*original` and the replacement's code must outlive every call:
//   a thread that is inside the replacement when the patch is undone goes on running there, and will still read
//   `*original`, which is therefore never reset. In practice: static storage, in a library that is never unloaded.
// Threads: other threads may call through the slots all the while. Each slot changes by one aligned atomic 8-byte
//   exchange, so a call reaches either the function or the replacement; `*original` is set before the first exchange.
//   Slots change one after another: for a moment some calls are intercepted and others are not. Installing and
//   undoing may be done from any thread (one lock for the process, as patches may share a page), but one object
//   belongs to one thread at a time. A process forked while another thread installs or undoes may do neither.
// Memory: a read-only page is made writable for the exchange only and then gets back exactly the protection found in
//   /proc/self/maps just before. A page that is writable already is not touched. Should the kernel refuse to take the
//   write permission away again, installing fails and undoing leaves the page writable.
// Not reached: copies of the function's address that were made earlier, and slots of any other library.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "elf/image.h"

namespace torch_xla_donate {

// One function to intercept, and by what.
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
  // A JUMP_SLOT that points into the image itself is one that has not been bound yet (lazy binding: it leads to the
  // library's own PLT until the first call). It is taken as if it held `expected`, and undoing puts the PLT address
  // back: its next call binds it as usual. One race is the dynamic linker's: a thread that is just binding such a
  // slot may write `expected` over the replacement; InPlace() tells. Libraries linked with `-z now` do not have it.
  //
  // Throws std::invalid_argument for a null pointer in `spec`, and std::runtime_error if
  //   - there are no slots,
  //   - a slot holds another function than expected: nothing has been changed then, `*original` included,
  //   - a page cannot be made writable (or read-only again): every slot has been put back then, while `*original` stays
  //     set, because a thread may have entered the replacement meanwhile. Slots that could not even be put back are
  //     counted at the end of the text.
  GotPatch(const ElfImage& image, const PatchSpec& spec, const std::vector<RelocationSlot>& slots);

  // Undoes the patch; slots that Undo() would report stay as they are.
  ~GotPatch();

  GotPatch(GotPatch&& other) noexcept = default;
  GotPatch& operator=(GotPatch&& other) noexcept;  // undoes this patch first

  // Puts back what the slots held, and returns how many slots could not be: 0 is success. Such a slot holds a
  // stranger's pointer, put there after ours (it is left alone, as the stranger may call on to us), or lies in a page
  // that can no longer be written. May be repeated: what is done is not done again, what was left is tried again, so
  // strangers that undo themselves in the right order leave no trace of either patch.
  [[nodiscard]] std::size_t Undo() noexcept;

  // How many slots lead to the replacement at this moment; SlotCount() of them unless somebody else has interfered.
  std::size_t InPlace() const noexcept;

  // How many slots were patched. Does not change, except that a moved-from object has none.
  std::size_t SlotCount() const noexcept { return slots_.size(); }

  const std::string& Symbol() const noexcept { return symbol_; }

 private:
  struct PatchedSlot {
    void** address;
    void* before;    // what to put back: `expected`, or the address in the PLT
    int protection;  // of the page, as found last; Undo() falls back on it where /proc cannot be read
    bool settled;    // nothing of ours is in the slot: not yet, or not any more
  };

  GotPatch() = default;
  void Install(const ElfImage& image, const PatchSpec& spec, const std::vector<RelocationSlot>& slots);

  std::string symbol_;
  void* expected_ = nullptr;
  void* replacement_ = nullptr;
  std::vector<PatchedSlot> slots_;
};

// Installs a table of patches, all or none, with one pass over the image's relocations. Throws as the constructor does;
// patches already installed have been undone by then, though calls made in between may have been intercepted.
std::vector<GotPatch> InstallAll(const ElfImage& image, const std::vector<PatchSpec>& specs);

}  // namespace torch_xla_donate
