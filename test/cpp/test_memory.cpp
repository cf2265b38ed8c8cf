// Judging pointers before they are dereferenced: what is readable, and what belongs to a library.
#include <sys/mman.h>
#include <unistd.h>

#include <memory>

#include "check.h"
#include "elf/memory.h"
#include "victims.h"

using namespace torch_xla_donate;

namespace {

const char constant[] = "read only";
char variable = 0;

}  // namespace

TEST(memory_of_the_program_the_heap_and_the_stack_is_readable) {
  const auto heap = std::make_unique<char[]>(100);
  char local[100] = {};
  const MemoryMap map;
  CHECK(map.IsReadable(constant, sizeof constant));
  CHECK(map.IsReadable(&variable, 1));
  CHECK(map.IsReadable(heap.get(), 100));
  CHECK(map.IsReadable(local, 100));
}

TEST(wild_pointers_are_not_readable) {
  const MemoryMap map;
  for (const std::uintptr_t wild : {std::uintptr_t{0}, std::uintptr_t{8}, ~std::uintptr_t{0}, ~std::uintptr_t{7},
                                    std::uintptr_t{0xdead0000}, std::uintptr_t{1} << 63}) {
    CHECK(!map.IsReadable(reinterpret_cast<const void*>(wild), 1));
    CHECK(!map.IsReadable(reinterpret_cast<const void*>(wild), SIZE_MAX));
  }
}

TEST(an_object_that_reaches_into_a_protected_page_is_not_readable) {
  // GIVEN three pages, of which the last cannot be read
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  auto* const pages = static_cast<char*>(mmap(nullptr, 3 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(pages != MAP_FAILED);
  // AND a second mapping, which the map joins with the first
  CHECK_EQ(mprotect(pages + page, page, PROT_READ | PROT_WRITE), 0);
  CHECK_EQ(mprotect(pages + 2 * page, page, PROT_NONE), 0);
  const MemoryMap map;
  CHECK(map.IsReadable(pages, 2 * page));
  CHECK(map.IsReadable(pages + 2 * page - 1, 1));
  CHECK(!map.IsReadable(pages + 2 * page - 1, 2));
  CHECK(!map.IsReadable(pages + 2 * page, 1));
}

TEST(a_library_contains_its_code_and_its_data) {
  const Library victim("victim_vtable");
  const void* const function = victim.Symbol("victim_add");
  const LoadedLibrary library(function);
  CHECK(library.Contains(function));
  CHECK(library.ContainsCode(function));
  CHECK(!library.Contains(&variable));
  CHECK(!library.Contains(nullptr));
  // The program's own data is in the program, and is not code.
  const LoadedLibrary program(&variable);
  CHECK(program.Contains(constant));
  CHECK(!program.ContainsCode(&variable));
  CHECK(program.ContainsCode(reinterpret_cast<const void*>(&InChild)));
}

TEST(no_library_contains_the_heap) {
  const auto heap = std::make_unique<char[]>(100);
  const LoadedLibrary none(heap.get());
  CHECK(!none.Contains(heap.get()));
  CHECK(!none.ContainsCode(heap.get()));
}
