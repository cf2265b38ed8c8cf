// Patching the slots of one function: intercepted calls, and restored slots.
#include <type_traits>

#include "check.h"
#include "hooks.h"

namespace {

// A call of the victim returns `plain`, and `patched` while the patch lives.
void InterceptAndUndo(const Library& victim, const PatchSpec& spec, const char* call, int plain, int patched) {
  // GIVEN a victim in a link mode, before and after the first call has bound the slot
  const ElfImage image = ElfImage::Find(victim.path);
  const std::vector<RelocationSlot> slots = SlotsOf(image, spec.symbol);
  for (const bool called_before : {false, true}) {
    if (called_before) CHECK_EQ(victim.Call(call, 2, 3), plain);
    const std::vector<void*> contents = Contents(slots);
    const std::string protections = ProtectionsOf(victim.path);
    {
      // WHEN the function is patched
      GotPatch patch(image, spec, slots);
      // THEN calls reach the replacement, which can call the original, and the pages have their old protection
      CHECK_EQ(victim.Call(call, 2, 3), patched);
      CHECK_EQ(spec.original->load(), spec.expected);
      CHECK_EQ(patch.SlotCount(), slots.size());
      CHECK_EQ(patch.InPlace(), slots.size());
      CHECK_EQ(ProtectionsOf(victim.path), protections);
    }
    // WHEN the patch is gone THEN every slot has its old bytes, and every page its old protection
    CHECK(Contents(slots) == contents);
    CHECK_EQ(ProtectionsOf(victim.path), protections);
    CHECK_EQ(victim.Call(call, 2, 3), plain);
  }
}

void InterceptAndUndo(const std::string& mode, const char* symbol) {
  InterceptAndUndo(Library(VictimName(mode)), First::Spec(symbol), "victim_add", 5, 1005);
}

}  // namespace

static_assert(!std::is_copy_constructible_v<GotPatch> && !std::is_copy_assignable_v<GotPatch>);
static_assert(std::is_nothrow_move_constructible_v<GotPatch> && !std::is_move_assignable_v<GotPatch>);

TEST(intercepts_and_undoes_with_default_link_options) { InterceptAndUndo("default", kAdd); }
TEST(intercepts_and_undoes_without_relro) { InterceptAndUndo("norelro", kAdd); }
TEST(intercepts_and_undoes_with_lazy_binding) { InterceptAndUndo("relro_lazy", kAdd); }
TEST(intercepts_and_undoes_in_read_only_slots) { InterceptAndUndo("relro_now", kAdd); }
TEST(intercepts_and_undoes_without_plt) { InterceptAndUndo("no_plt", kAdd); }
TEST(intercepts_and_undoes_a_pointer_in_a_table) { InterceptAndUndo("table", kAdd); }
TEST(intercepts_and_undoes_an_inherited_virtual) { InterceptAndUndo("vtable", kVirtualAdd); }
TEST(intercepts_and_undoes_with_packed_relocations) { InterceptAndUndo("relr", kAdd); }

TEST(all_slots_of_the_symbol_are_patched) {
  InterceptAndUndo("both", kAdd);
  const Library victim("victim_both");
  const GotPatch patch = Install(ElfImage::Find(victim.path), First::Spec(kAdd));
  CHECK_EQ(patch.InPlace(), 2u);
  CHECK_EQ(victim.Add(2, 3), 1005);
  CHECK_EQ(victim.Call("victim_add_by_table", 2, 3), 1005);
}

static std::atomic<void*> own_add{nullptr};
static int OwnAdd(int a, int b) { return 100 + reinterpret_cast<int (*)(int, int)>(own_add.load())(a, b); }

TEST(a_function_of_the_library_itself_is_intercepted_and_undone) {
  for (const char* mode : {"default", "relro_lazy", "relro_now", "no_plt"}) {
    // GIVEN a library that calls its own exported function
    const Library victim(VictimName(mode));
    const PatchSpec spec{"victim_add", victim.Symbol("victim_add"), reinterpret_cast<void*>(&OwnAdd), &own_add};
    InterceptAndUndo(victim, spec, "victim_add_twice", 10, 210);
  }
}

TEST(a_slot_not_bound_yet_gets_its_plt_address_back) {
  // GIVEN a lazily bound library that has not called the function yet
  const Library victim("victim_relro_lazy");
  const ElfImage image = ElfImage::Find(victim.path);
  void** const slot = SlotsOf(image, kAdd).at(0).address;
  void* const plt = *slot;
  CHECK(image.Contains(plt));
  // WHEN it is patched, called and undone
  GotPatch patch = Install(image, First::Spec(kAdd));
  CHECK_EQ(victim.Add(2, 3), 1005);
  CHECK_EQ(patch.Undo(), 0u);
  // THEN the slot leads to the PLT again, and the next call binds it
  CHECK_EQ(*slot, plt);
  CHECK_EQ(victim.Add(2, 3), 5);
  CHECK_EQ(*slot, CalleeFunction(kAdd));
}

TEST(a_slot_bound_over_the_patch_counts_as_undone) {
  // GIVEN a patched lazy slot
  const Library victim("victim_relro_lazy");
  const ElfImage image = ElfImage::Find(victim.path);
  GotPatch patch = Install(image, First::Spec(kAdd));
  // WHEN a binding that has begun writes the function, as the dynamic linker does
  *SlotsOf(image, kAdd).at(0).address = CalleeFunction(kAdd);
  // THEN the patch reports it, and has nothing to restore
  CHECK_EQ(patch.InPlace(), 0u);
  CHECK_EQ(patch.Undo(), 0u);
  CHECK_EQ(victim.Add(2, 3), 5);
}

TEST(installing_and_undoing_may_be_repeated) {
  const Library victim("victim_relro_now");
  const ElfImage image = ElfImage::Find(victim.path);
  for (int round = 0; round < 2; ++round) {
    GotPatch patch = Install(image, First::Spec(kAdd));
    CHECK_EQ(victim.Add(2, 3), 1005);
    CHECK_EQ(patch.Undo(), 0u);
    CHECK_EQ(patch.Undo(), 0u);
    CHECK_EQ(victim.Add(2, 3), 5);
    // An undone patch does not touch a later one, even with the same replacement.
    const GotPatch later = Install(image, First::Spec(kAdd));
    CHECK_EQ(patch.Undo(), 0u);
    CHECK_EQ(victim.Add(2, 3), 1005);
  }
  CHECK_EQ(victim.Add(2, 3), 5);
}

TEST(two_patches_may_share_a_page) {
  // GIVEN two functions with slots in one read-only page
  const Library victim("victim_relro_now");
  const ElfImage image = ElfImage::Find(victim.path);
  const std::string protections = ProtectionsOf(victim.path);
  // WHEN both are patched and undone in the order of installation THEN neither affects the other
  GotPatch add = Install(image, First::Spec(kAdd));
  GotPatch multiply = Install(image, Second::Spec(kMultiply));
  CHECK_EQ(ProtectionsOf(victim.path), protections);
  CHECK_EQ(add.Undo(), 0u);
  CHECK_EQ(ProtectionsOf(victim.path), protections);
  CHECK_EQ(victim.Add(2, 3), 5);
  CHECK_EQ(victim.Multiply(2, 3), 20006);
  CHECK_EQ(multiply.Undo(), 0u);
  CHECK_EQ(ProtectionsOf(victim.path), protections);
  CHECK_EQ(victim.Multiply(2, 3), 6);
}

TEST(only_the_named_library_is_patched) {
  const Library victim("victim_relro_now"), other("victim_no_plt");
  const GotPatch patch = Install(ElfImage::Find(victim.path), First::Spec(kAdd));
  CHECK_EQ(victim.Add(2, 3), 1005);
  CHECK_EQ(victim.Multiply(2, 3), 6);
  CHECK_EQ(other.Add(2, 3), 5);
}

TEST(a_patch_can_be_moved) {
  const Library victim("victim_relro_now");
  {
    GotPatch patch = Install(ElfImage::Find(victim.path), First::Spec(kAdd));
    const GotPatch moved = std::move(patch);
    CHECK_EQ(victim.Add(2, 3), 1005);
  }
  CHECK_EQ(victim.Add(2, 3), 5);
}

TEST(a_table_is_installed_as_a_whole) {
  const Library victim("victim_both");
  const ElfImage image = ElfImage::Find(victim.path);
  {
    const std::vector<GotPatch> patches = InstallAll(image, {First::Spec(kAdd), Second::Spec(kMultiply)});
    CHECK_EQ(patches.size(), 2u);
    CHECK_EQ(patches.at(0).SlotCount(), 2u);
    CHECK_EQ(victim.Add(2, 3), 1005);
    CHECK_EQ(victim.Multiply(2, 3), 20006);
  }
  CHECK_EQ(victim.Add(2, 3), 5);
  CHECK_EQ(victim.Multiply(2, 3), 6);
}

TEST(a_forked_child_sees_the_patch_and_may_undo_its_own) {
  // GIVEN a patch
  const Library victim("victim_relro_now");
  GotPatch patch = Install(ElfImage::Find(victim.path), First::Spec(kAdd));
  // WHEN a child undoes it
  CHECK(InChild([&] {
    CHECK_EQ(victim.Add(2, 3), 1005);
    CHECK_EQ(patch.Undo(), 0u);
    CHECK_EQ(victim.Add(2, 3), 5);
  }));
  // THEN the parent keeps it
  CHECK_EQ(victim.Add(2, 3), 1005);
  CHECK_EQ(patch.Undo(), 0u);
}
