// One loaded shared library, and the relocation slots through which it reaches functions of other libraries.
//
// A library that calls an imported function does so through a pointer which the dynamic linker has filled in: a slot.
// This file finds those pointers; it changes nothing. Changing them is got_patch.h's work.
//
// Ownership: an ElfImage is a small copyable value that points into the mapped library. It does not keep the library
//   loaded: whoever calls dlclose() must first drop the image. (CPython never unloads an extension module.)
// Threads: all members are const and read memory that does not change after loading; any number of threads may call
//   them. Find() takes the dynamic linker's lock for as long as it walks the list of loaded libraries.
// Errors: std::runtime_error, thrown by Find() only. Every text names the file, what was found and what to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_xla_donate {

// How the library reaches the function through a slot.
enum class RelocationKind {
  kJumpSlot,  // a call through the PLT; the only kind that may be bound lazily, at the first call
  kGlobDat,   // a call or an address loaded through the GOT (for example -fno-plt)
  kAbsolute,  // a pointer in data: a vtable entry, a static table of functions
};

// The relocation's name without the architecture: "JUMP_SLOT", "GLOB_DAT" or "ABS64".
const char* Name(RelocationKind kind) noexcept;

struct RelocationSlot {
  void** address;  // inside the library; its page may be read-only (see ElfImage::InRelro)
  RelocationKind kind;
};

class ElfImage {
 public:
  // The loaded library whose file is `path`. Compared is the file (device and inode), not the spelling, so a symlink or
  // a relative path will do. One limit: a library that was itself loaded by a relative path is not found once the
  // working directory has changed, because the dynamic linker remembers only that relative name.
  // Throws if there is no such file, if it is not loaded (it has to be imported first), or if its dynamic section lacks
  // what is read here. The main program is never matched.
  static ElfImage Find(const std::string& path);

  // Every slot of the function `symbol` (mangled name), which the library imports, or defines itself and calls through
  // a slot all the same, as another library's could take its place. Empty if there is none. Calls to a function of its
  // own need not pass a slot: those that the compiler has inlined or bound do not.
  // Left out are relocations with an addend (they point into an object, not at a function). Symbol versions are not
  // told apart.
  std::vector<RelocationSlot> SlotsOf(std::string_view symbol) const;

  // The same for several symbols in one pass over the relocations, which is what costs time in a large library.
  // The result has one entry for each name asked for, empty where nothing was found.
  std::unordered_map<std::string, std::vector<RelocationSlot>> SlotsOfEach(
      const std::vector<std::string>& symbols) const;

  // As given to Find().
  const std::string& Path() const noexcept { return path_; }

  // What the dynamic linker has added to the addresses in the file.
  std::uintptr_t LoadBase() const noexcept { return base_; }

  // Whether the address lies between the library's first and last loaded byte.
  bool Contains(const void* address) const noexcept { return mapped_.Contains(address); }

  // Whether the dynamic linker has made the address's page read-only after relocation (PT_GNU_RELRO, in whole pages).
  bool InRelro(const void* address) const noexcept { return relro_.Contains(address); }

 private:
  struct Range {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    bool Contains(const void* address) const noexcept;
  };
  struct Table {  // a relocation table in memory; Elf64_Rela stays out of this header
    const void* data = nullptr;
    std::size_t bytes = 0;
  };

  ElfImage() = default;
  void ReadDynamicSection(const void* dynamic);

  std::string path_;
  std::uintptr_t base_ = 0;
  Range mapped_;
  Range relro_;
  Table relocations_;      // DT_RELA
  Table plt_relocations_;  // DT_JMPREL
  const void* symbols_ = nullptr;
  const char* strings_ = nullptr;
  std::size_t strings_size_ = 0;
};

}  // namespace torch_xla_donate
