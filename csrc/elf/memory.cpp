// Reads the kernel's list of mappings, and the program headers of the loaded libraries.
#include "elf/memory.h"

#include <link.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace torch_xla_donate {
namespace {

std::uintptr_t Value(const void* address) noexcept { return reinterpret_cast<std::uintptr_t>(address); }

struct AddressSearch {
  const void* address;
  dl_phdr_info found = {};
};

// The flags of the library's segment that the address lies in; 0 if it lies in none.
unsigned Flags(std::uintptr_t base, const ElfW(Phdr) * headers, std::size_t count, const void* address) noexcept {
  for (const ElfW(Phdr)* header = headers; header != headers + count; ++header) {
    const std::uintptr_t begin = base + header->p_vaddr;
    if (header->p_type == PT_LOAD && begin <= Value(address) && Value(address) - begin < header->p_memsz) {
      return header->p_flags;
    }
  }
  return 0;
}

// Must not throw, because the dynamic linker calls it.
int FindAddress(dl_phdr_info* info, std::size_t, void* argument) noexcept {
  AddressSearch& search = *static_cast<AddressSearch*>(argument);
  if (Flags(info->dlpi_addr, info->dlpi_phdr, info->dlpi_phnum, search.address) == 0) return 0;
  search.found = *info;
  return 1;
}

}  // namespace

MemoryMap::MemoryMap() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Range range{};
    char dash = 0, readable = '-';
    std::istringstream fields(line);
    if (!(fields >> std::hex >> range.begin >> dash >> range.end >> readable) || readable != 'r') continue;
    if (!readable_.empty() && readable_.back().end == range.begin) {
      readable_.back().end = range.end;
    } else {
      readable_.push_back(range);
    }
  }
  if (readable_.empty()) {
    throw std::runtime_error("cannot read /proc/self/maps, which tells what memory is readable: " +
                             std::generic_category().message(errno) + "; mount /proc");
  }
}

bool MemoryMap::IsReadable(const void* address, std::size_t bytes) const noexcept {
  const std::uintptr_t begin = Value(address);
  const auto after = std::upper_bound(readable_.begin(), readable_.end(), begin,
                                      [](std::uintptr_t value, const Range& range) { return value < range.begin; });
  return after != readable_.begin() && begin < std::prev(after)->end && bytes <= std::prev(after)->end - begin;
}

LoadedLibrary::LoadedLibrary(const void* address) noexcept {
  AddressSearch search{address};
  dl_iterate_phdr(FindAddress, &search);
  base_ = search.found.dlpi_addr;
  headers_ = search.found.dlpi_phdr;
  count_ = search.found.dlpi_phnum;
}

unsigned LoadedLibrary::FlagsAt(const void* address) const noexcept {
  return Flags(base_, static_cast<const ElfW(Phdr)*>(headers_), count_, address);
}

bool LoadedLibrary::ContainsCode(const void* address) const noexcept { return (FlagsAt(address) & PF_X) != 0; }

}  // namespace torch_xla_donate
