// A loaded shared library and the relocation slots through which it calls functions of other libraries.
//
// The dynamic linker fills the slots. This file only finds them; patch.h replaces their contents.
//
// Ownership: an ElfImage is a small copyable value that points into the mapped library. It does not keep the library
//   loaded, so drop it before you call dlclose(). (CPython never unloads an extension module.)
// Threads: all members are const and read memory that does not change after loading, so any number of threads may call
//   them. Find() asks the dynamic linker, which has its own lock.
// Errors: only Find() throws, std::runtime_error. The text names the file, the finding and the remedy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "elf/memory.h"

namespace torch_xla_donate {

// How the library reaches the function.
enum class RelocationKind {
  kJumpSlot,  // a call through the PLT; the only kind that may be bound lazily, at the first call
  kGlobDat,   // a call or an address loaded through the GOT (for example -fno-plt)
  kAbsolute,  // a pointer in data: a vtable entry, a static table of functions
};

// The relocation's name without the architecture: "JUMP_SLOT", "GLOB_DAT" or "ABS64".
const char* Name(RelocationKind kind) noexcept;

struct RelocationSlot {
  void** address;  // inside the library; its page may be read-only
  RelocationKind kind;
};

class ElfImage {
 public:
  // Returns the loaded library whose file is `path`. The dynamic linker compares device and inode if it does not know
  // the name, so a symlink or a relative path works. It never matches the main program. Throws if the file does not
  // exist, the library is not loaded (import it first), or it lacks a dynamic table.
  static ElfImage Find(const std::string& path);

  // Returns every slot of these functions (mangled names). The result has an entry for each name, empty if it has no
  // slots. One pass over the relocations finds all, because it takes most of the time in a large library. The library
  // may define a function itself and still call it through a slot, since another library could replace it. Calls that
  // the compiler has inlined or bound pass no slot.
  // Omits relocations with an addend, which point into an object. Does not distinguish symbol versions.
  std::unordered_map<std::string, std::vector<RelocationSlot>> SlotsOfEach(
      const std::vector<std::string>& symbols) const;

  // As given to Find().
  const std::string& Path() const noexcept { return path_; }

  // Whether the address lies in a segment of the library.
  bool Contains(const void* address) const noexcept { return library_.Contains(address); }

 private:
  struct Table {  // a relocation table in memory; Elf64_Rela stays out of this header
    const void* data = nullptr;
    std::size_t bytes = 0;
  };

  ElfImage(const std::string& path, std::uintptr_t base, const void* dynamic);
  void ReadDynamicSection(const void* dynamic);

  std::string path_;
  std::uintptr_t base_;  // what the dynamic linker has added to the addresses in the file
  LoadedLibrary library_;
  Table relocations_;      // DT_RELA
  Table plt_relocations_;  // DT_JMPREL
  const void* symbols_ = nullptr;
  const char* strings_ = nullptr;
  std::size_t strings_size_ = 0;
};

}  // namespace torch_xla_donate
