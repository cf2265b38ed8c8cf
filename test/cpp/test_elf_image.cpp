// Finding a loaded library and the slots of the functions it imports.
#include <elf.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <filesystem>

#include "check.h"
#include "elf/image.h"
#include "victims.h"

using namespace torch_xla_donate;

namespace {

// The kinds of the slots, sorted, such as "ABS64 JUMP_SLOT".
std::string Kinds(const std::vector<RelocationSlot>& slots) {
  std::vector<std::string> names;
  for (const RelocationSlot& slot : slots) names.push_back(Name(slot.kind));
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

std::string KindsIn(const std::string& mode, const std::string& symbol) {
  const Library victim(VictimName(mode));
  return Kinds(SlotsOf(ElfImage::Find(victim.path), symbol));
}

// An entry of a loaded library's dynamic section, made writable. The linker would not load a file with a wrong entry.
Elf64_Dyn* DynamicEntry(const Library& library, Elf64_Sxword tag) {
  link_map* map = nullptr;
  CHECK_EQ(dlinfo(dlopen(library.path.c_str(), RTLD_LAZY | RTLD_NOLOAD), RTLD_DI_LINKMAP, &map), 0);
  Elf64_Dyn* entry = map->l_ld;
  while (entry->d_tag != tag && entry->d_tag != DT_NULL) ++entry;
  CHECK_EQ(entry->d_tag, tag);
  const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const page = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(entry) & ~(size - 1));
  CHECK_EQ(mprotect(page, 2 * size, PROT_READ | PROT_WRITE), 0);  // the entry may cross into the next one
  return entry;
}

}  // namespace

TEST(a_library_is_found_by_its_path_a_symlink_and_a_relative_path) {
  // GIVEN a loaded library, and a symlink to its file
  const Library victim("victim_default");
  const std::filesystem::path link =
      std::filesystem::temp_directory_path() / ("txd_link_" + std::to_string(getpid()) + ".so");
  std::filesystem::create_symlink(victim.path, link);
  // WHEN Find() gets three names of it
  const ElfImage by_path = ElfImage::Find(victim.path);
  const auto slot_in = [](const ElfImage& image) { return SlotsOf(image, kAdd).at(0).address; };
  std::filesystem::current_path(link.parent_path());
  const std::string through_link = MessageOf([&] {
    for (const auto& name : {link, link.filename(), "." / link.filename()})
      CHECK_EQ(slot_in(ElfImage::Find(name)), slot_in(by_path));
  });
  std::filesystem::remove(link);
  // THEN all are the same image, which contains the library's own functions
  CHECK_EQ(through_link, "");
  CHECK_EQ(by_path.Path(), victim.path);
  CHECK(by_path.Contains(victim.Symbol("victim_add")));
  CHECK(!by_path.Contains(CalleeFunction(kAdd)));
}

TEST(a_library_loaded_by_a_relative_path_is_found_from_another_folder) {
  const std::filesystem::path path = LibraryPath("victim_default");
  std::filesystem::current_path(path.parent_path());
  CHECK(dlopen(("./" + path.filename().string()).c_str(), RTLD_LAZY) != nullptr);
  std::filesystem::current_path("/");
  CHECK_EQ(SlotsOf(ElfImage::Find(path), kAdd).size(), 1u);
}

TEST(a_library_that_is_not_loaded_is_an_error) {
  const std::string path = LibraryPath("victim_never_loaded");
  const std::string message = MessageOf([&] { ElfImage::Find(path); });
  CHECK_CONTAINS(message, "\"" + path + "\" exists but is not loaded in this process; it must be imported first");
}

TEST(a_file_that_does_not_exist_is_an_error) {
  const std::string message = MessageOf([&] { ElfImage::Find("no/such/library.so"); });
  CHECK_CONTAINS(message, "\"no/such/library.so\": No such file or directory; expected the path of an imported");
}

TEST(a_dynamic_section_that_cannot_be_read_is_an_error) {
  constexpr Elf64_Sxword kNothing = DT_LOOS;
  constexpr Elf64_Xword kOutside = Elf64_Xword{1} << 62;
  const struct {
    Elf64_Sxword tag, new_tag;
    Elf64_Xword value;
    const char* message;
  } cases[] = {
      {DT_SYMTAB, DT_SYMTAB, kOutside, "has an address outside itself in its dynamic section, expected tables inside"},
      {DT_SYMTAB, kNothing, 0, "has no symbol table, expected DT_SYMTAB"},
      {DT_STRTAB, kNothing, 0, "has no string table, expected DT_STRTAB and DT_STRSZ"},
      {DT_STRSZ, DT_STRSZ, 0, "has no string table, expected DT_STRTAB and DT_STRSZ"},
      {DT_RELAENT, DT_RELAENT, 16, "has relocations of another size, expected the 24 bytes of Elf64_Rela"},
      {DT_PLTREL, DT_PLTREL, DT_REL, "has PLT relocations without addends, expected DT_PLTREL to be DT_RELA"},
      {DT_RELA, kNothing, 0, "has DT_RELASZ alone, expected DT_RELA too"},
      {DT_JMPREL, kNothing, 0, "has DT_PLTRELSZ alone, expected DT_JMPREL too"},
  };
  const Library victim("victim_default");
  for (const auto& one : cases) {
    // GIVEN a loaded library with one wrong entry
    Elf64_Dyn* const entry = DynamicEntry(victim, one.tag);
    const Elf64_Dyn before = *entry;
    entry->d_tag = one.new_tag;
    entry->d_un.d_val = one.value;
    // WHEN Find() reads it
    const std::string message = MessageOf([&] { ElfImage::Find(victim.path); });
    *entry = before;
    // THEN the error names the file, the finding and the remedy
    CHECK_CONTAINS(message, "the library \"" + victim.path + "\" " + one.message);
    CHECK_CONTAINS(message, "; it cannot be patched: report which build of it this is");
  }
  CHECK_EQ(KindsIn("default", kAdd), "JUMP_SLOT");
}

TEST(a_call_has_a_jump_slot_in_every_mode_of_binding) {
  for (const char* mode : {"default", "norelro", "relro_lazy", "relro_now"}) CHECK_EQ(KindsIn(mode, kAdd), "JUMP_SLOT");
}

TEST(a_call_without_plt_has_a_glob_dat) { CHECK_EQ(KindsIn("no_plt", kAdd), "GLOB_DAT"); }

// Contains, not equals: on aarch64 the GNU linker adds a JUMP_SLOT to every function whose address is taken.
TEST(an_address_in_a_table_has_an_absolute_slot) { CHECK_CONTAINS(KindsIn("table", kAdd), "ABS64"); }

TEST(an_inherited_virtual_has_an_absolute_slot) { CHECK_CONTAINS(KindsIn("vtable", kVirtualAdd), "ABS64"); }

TEST(all_slots_of_a_symbol_are_found) { CHECK_EQ(KindsIn("both", kAdd), "ABS64 JUMP_SLOT"); }

TEST(packed_relative_relocations_do_not_disturb) { CHECK_EQ(KindsIn("relr", kAdd), "ABS64 JUMP_SLOT"); }

TEST(functions_that_are_not_imported_have_no_slots) {
  CHECK_EQ(KindsIn("both", "victim_multiply"), "");  // the library defines it and does not call it
  CHECK_EQ(KindsIn("both", "callee_ad"), "");        // the beginning of a name
  CHECK_EQ(KindsIn("both", kVirtualAdd), "");        // only another victim imports it
  CHECK_EQ(KindsIn("both", "callee_values"), "");    // a pointer into an array is not a function slot
  CHECK_EQ(KindsIn("both", ""), "");
}

TEST(a_batch_finds_what_single_searches_find) {
  // GIVEN a library that imports two of three functions
  const Library victim("victim_both");
  const ElfImage image = ElfImage::Find(victim.path);
  // WHEN one call looks for all three, one of them twice
  const auto slots = image.SlotsOfEach({kAdd, kMultiply, "absent", kAdd});
  // THEN each has an entry
  CHECK_EQ(slots.size(), 3u);
  CHECK_EQ(Kinds(slots.at(kAdd)), "ABS64 JUMP_SLOT");
  CHECK_EQ(Kinds(slots.at(kMultiply)), "JUMP_SLOT");
  CHECK_EQ(slots.at(kMultiply).at(0).address, SlotsOf(image, kMultiply).at(0).address);
  CHECK(slots.at("absent").empty());
}
