// Walks the dynamic section of a loaded library: relocation -> symbol -> name.
#include "elf/image.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace torch_xla_donate {
namespace {

struct RelocationNumber {
  std::uint32_t number;
  RelocationKind kind;
};

#if defined(__x86_64__) && defined(__LP64__)
constexpr RelocationNumber kFunctionRelocations[] = {
    {R_X86_64_JUMP_SLOT, RelocationKind::kJumpSlot},
    {R_X86_64_GLOB_DAT, RelocationKind::kGlobDat},
    {R_X86_64_64, RelocationKind::kAbsolute},
};
#elif defined(__aarch64__) && defined(__LP64__)
constexpr RelocationNumber kFunctionRelocations[] = {
    {R_AARCH64_JUMP_SLOT, RelocationKind::kJumpSlot},
    {R_AARCH64_GLOB_DAT, RelocationKind::kGlobDat},
    {R_AARCH64_ABS64, RelocationKind::kAbsolute},
};
#else
#error \
    "torch_xla_donate knows the relocations of 64-bit x86-64 and aarch64 Linux. To port it, add this architecture's \
numbers of JUMP_SLOT, GLOB_DAT and the absolute 64-bit relocation here, then run the ctest suite in test/cpp."
#endif

const RelocationKind* KindOf(std::uint64_t number) noexcept {
  for (const RelocationNumber& known : kFunctionRelocations) {
    if (known.number == number) return &known.kind;
  }
  return nullptr;
}

}  // namespace

const char* Name(RelocationKind kind) noexcept {
  switch (kind) {
    case RelocationKind::kJumpSlot: return "JUMP_SLOT";
    case RelocationKind::kGlobDat: return "GLOB_DAT";
    case RelocationKind::kAbsolute: break;
  }
  return "ABS64";
}

ElfImage::ElfImage(const std::string& path, std::uintptr_t base, const void* dynamic)
    : path_(path), base_(base), library_(dynamic) {
  ReadDynamicSection(dynamic);
}

ElfImage ElfImage::Find(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0) {
    throw std::runtime_error("cannot look at the library \"" + path + "\": " + std::generic_category().message(errno) +
                             "; expected the path of an imported shared library");
  }
  // The dynamic linker would look for a name without a slash in its search path.
  const std::string name = path.find('/') == std::string::npos ? "./" + path : path;
  void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) {
    throw std::runtime_error("the library \"" + path +
                             "\" exists but is not loaded in this process; it must be imported first");
  }
  link_map* map = nullptr;
  dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map));
  ElfImage image(path, map->l_addr, map->l_ld);
  dlclose(handle);
  return image;
}

void ElfImage::ReadDynamicSection(const void* dynamic) {
  const auto require = [this](bool condition, const char* found, const char* expected) {
    if (!condition) {
      throw std::runtime_error("the library \"" + path_ + "\" " + found + ", expected " + expected +
                               "; it cannot be patched: report which build of it this is");
    }
  };
  // Some C libraries store relocated addresses here. Others, and glibc on some architectures, keep those of the file.
  const auto pointer = [&](std::uint64_t value) {
    const auto as_is = reinterpret_cast<const void*>(value);
    const auto moved = reinterpret_cast<const void*>(base_ + value);
    require(Contains(as_is) || Contains(moved), "has an address outside itself in its dynamic section",
            "tables inside the library");
    return Contains(as_is) ? as_is : moved;
  };

  std::uint64_t entry_size = sizeof(Elf64_Rela);
  std::uint64_t plt_type = DT_RELA;
  // DT_RELR is not read, because it packs relative relocations, which name no symbol.
  for (const auto* entry = static_cast<const Elf64_Dyn*>(dynamic); entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB: symbols_ = pointer(entry->d_un.d_ptr); break;
      case DT_STRTAB: strings_ = static_cast<const char*>(pointer(entry->d_un.d_ptr)); break;
      case DT_STRSZ: strings_size_ = entry->d_un.d_val; break;
      case DT_RELA: relocations_.data = pointer(entry->d_un.d_ptr); break;
      case DT_RELASZ: relocations_.bytes = entry->d_un.d_val; break;
      case DT_RELAENT: entry_size = entry->d_un.d_val; break;
      case DT_JMPREL: plt_relocations_.data = pointer(entry->d_un.d_ptr); break;
      case DT_PLTRELSZ: plt_relocations_.bytes = entry->d_un.d_val; break;
      case DT_PLTREL: plt_type = entry->d_un.d_val; break;
      default: break;
    }
  }
  require(symbols_ != nullptr, "has no symbol table", "DT_SYMTAB");
  require(strings_ != nullptr && strings_size_ != 0, "has no string table", "DT_STRTAB and DT_STRSZ");
  require(entry_size == sizeof(Elf64_Rela), "has relocations of another size", "the 24 bytes of Elf64_Rela");
  require(plt_type == DT_RELA, "has PLT relocations without addends", "DT_PLTREL to be DT_RELA");
  require(relocations_.data != nullptr || relocations_.bytes == 0, "has DT_RELASZ alone", "DT_RELA too");
  require(plt_relocations_.data != nullptr || plt_relocations_.bytes == 0, "has DT_PLTRELSZ alone", "DT_JMPREL too");
}

std::unordered_map<std::string, std::vector<RelocationSlot>> ElfImage::SlotsOfEach(
    const std::vector<std::string>& symbols) const {
  std::unordered_map<std::string, std::vector<RelocationSlot>> slots;
  std::unordered_map<std::string_view, std::vector<RelocationSlot>*> wanted;  // looked up without building a string
  for (const std::string& symbol : symbols) wanted[symbol] = &slots[symbol];

  for (const Table& table : {relocations_, plt_relocations_}) {
    const auto* begin = static_cast<const Elf64_Rela*>(table.data);
    const std::size_t count = table.bytes / sizeof(Elf64_Rela);
    for (const Elf64_Rela* it = begin; it != begin + count; ++it) {
      const RelocationKind* kind = KindOf(ELF64_R_TYPE(it->r_info));
      if (kind == nullptr || it->r_addend != 0) continue;
      const Elf64_Sym& symbol = static_cast<const Elf64_Sym*>(symbols_)[ELF64_R_SYM(it->r_info)];
      if (symbol.st_name >= strings_size_) continue;
      const auto match = wanted.find(strings_ + symbol.st_name);
      if (match != wanted.end()) match->second->push_back({reinterpret_cast<void**>(base_ + it->r_offset), *kind});
    }
  }
  return slots;
}

}  // namespace torch_xla_donate
