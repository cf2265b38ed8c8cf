// The mappings of this process, to judge a pointer before it is dereferenced.
//
// Ownership: both classes are values. They describe the process as it was when they were made, so drop them before a
//   library is unloaded.
// Threads: all members are const. Errors: only MemoryMap() throws, std::runtime_error if /proc/self/maps cannot be
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_xla_donate {

class MemoryMap {
 public:
  MemoryMap();

  // Whether all these bytes can be read.
  bool IsReadable(const void* address, std::size_t bytes) const noexcept;

 private:
  struct Range {
    std::uintptr_t begin, end;
  };
  std::vector<Range> readable_;  // in order; neighbours are joined
};

// The loaded library that contains an address; an empty one if none does.
class LoadedLibrary {
 public:
  explicit LoadedLibrary(const void* address) noexcept;

  bool Contains(const void* address) const noexcept { return FlagsAt(address) != 0; }
  // In a segment that may be executed.
  bool ContainsCode(const void* address) const noexcept;

 private:
  // Those of the segment that the address lies in; 0 if it lies in none.
  unsigned FlagsAt(const void* address) const noexcept;

  std::uintptr_t base_ = 0;
  const void* headers_ = nullptr;  // of the program, in the library's own memory
  std::size_t count_ = 0;
};

}  // namespace torch_xla_donate
