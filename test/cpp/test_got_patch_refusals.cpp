// Refusals of a patch, and the slots that it leaves: wrong functions, unwritable pages, other patches.
#include <fcntl.h>
#include <sys/mman.h>

#include "check.h"
#include "hooks.h"

namespace {

// Makes the slot's page permanently read-only: a shared mapping of a file that was opened for reading.
void SealPageOf(void** slot) {
  const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  char* const page = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(slot) & ~(size - 1));
  char name[] = "txd_sealed_page_XXXXXX";
  const int writer = mkstemp(name);
  const int reader = open(name, O_RDONLY);
  unlink(name);
  CHECK_EQ(write(writer, page, size), static_cast<ssize_t>(size));
  CHECK_EQ(static_cast<void*>(page), mmap(page, size, PROT_READ, MAP_SHARED | MAP_FIXED, reader, 0));
}

// The slot of a kind among those of `callee_add` in the victim "both": a writable JUMP_SLOT and an ABS64 in RELRO.
RelocationSlot SlotOfKind(const ElfImage& image, RelocationKind kind) {
  for (const RelocationSlot& slot : SlotsOf(image, kAdd)) {
    if (slot.kind == kind) return slot;
  }
  throw std::runtime_error(std::string("no slot of kind ") + Name(kind));
}

}  // namespace

TEST(zero_slots_are_an_error) {
  const Library victim("victim_vtable");
  const std::string message = MessageOf([&] { Install(ElfImage::Find(victim.path), First::Spec(kAdd)); });
  CHECK_CONTAINS(message, "found no slot of \"callee_add\" in \"" + victim.path + "\", expected at least one");
  CHECK_EQ(First::original.load(), nullptr);
}

TEST(null_pointers_are_an_error) {
  const Library victim("victim_relro_now");
  const ElfImage image = ElfImage::Find(victim.path);
  for (int lacking = 0; lacking < 3; ++lacking) {
    PatchSpec spec = First::Spec(kAdd);
    if (lacking == 0) spec.expected = nullptr;
    if (lacking == 1) spec.replacement = nullptr;
    if (lacking == 2) spec.original = nullptr;
    CHECK_CONTAINS(MessageOf<std::invalid_argument>([&] { Install(image, spec); }), "patch of \"callee_add\" lacks");
    CHECK_EQ(victim.Add(2, 3), 5);
  }
}

TEST(another_function_than_expected_is_an_error_and_changes_nothing) {
  // GIVEN slots that hold callee_add
  const Library victim("victim_both");
  CHECK_EQ(victim.Add(2, 3), 5);
  const ElfImage image = ElfImage::Find(victim.path);
  const std::vector<RelocationSlot> slots = SlotsOf(image, kAdd);
  const std::vector<void*> contents = Contents(slots);
  // WHEN another function is expected there
  PatchSpec spec = First::Spec(kAdd);
  spec.expected = CalleeFunction(kMultiply);
  const std::string message = MessageOf([&] { Install(image, spec); });
  // THEN the error names the slot, both functions and their files, and nothing has changed
  std::ostringstream slot;
  slot << static_cast<void*>(slots.at(0).address) << " of \"callee_add\" in \"" << victim.path << "\" holds ";
  CHECK_CONTAINS(message, slot.str());
  CHECK_CONTAINS(message, "(callee_add in " + LibraryPath("callee") + "), expected ");
  CHECK_CONTAINS(message, "(callee_multiply in " + LibraryPath("callee") + "); probably another tool has patched it");
  CHECK(Contents(slots) == contents);
  CHECK_EQ(First::original.load(), nullptr);
}

TEST(an_own_address_in_a_data_slot_is_not_taken_for_a_lazy_one) {
  // GIVEN a table entry that points at a function of the library itself
  const Library victim("victim_both");
  const ElfImage image = ElfImage::Find(victim.path);
  void* const own = victim.Symbol("victim_multiply");
  std::atomic<void*> unused{nullptr};
  const std::vector<RelocationSlot> table = {SlotOfKind(image, RelocationKind::kAbsolute)};
  const GotPatch stranger(image, {kAdd, CalleeFunction(kAdd), own, &unused}, table);
  // WHEN we patch THEN it is an error
  CHECK_CONTAINS(MessageOf([&] { Install(image, First::Spec(kAdd)); }), "(victim_multiply in " + victim.path + ")");
}

TEST(a_page_that_cannot_be_made_writable_is_an_error_and_everything_is_undone) {
  // GIVEN a writable slot, and one in a page that cannot become writable
  const Library victim("victim_both");
  const ElfImage image = ElfImage::Find(victim.path);
  const RelocationSlot jump = SlotOfKind(image, RelocationKind::kJumpSlot);
  const RelocationSlot sealed = SlotOfKind(image, RelocationKind::kAbsolute);
  void* const before = *jump.address;
  SealPageOf(sealed.address);
  // WHEN they are patched, the writable one first
  const std::string message = MessageOf([&] { GotPatch(image, First::Spec(kAdd), {jump, sealed}); });
  // THEN the error gives the kernel's reason, and the first slot has its old contents
  CHECK_CONTAINS(message, "cannot replace the ABS64 at ");
  CHECK_CONTAINS(message, "protection gave \"Permission denied\"");
  CHECK_EQ(message.find("could not be put back"), std::string::npos);
  CHECK_EQ(*jump.address, before);
  CHECK_EQ(victim.Add(2, 3), 5);
  CHECK_EQ(victim.Call("victim_add_by_table", 2, 3), 5);
}

TEST(a_slot_that_can_no_longer_be_written_is_reported_by_undo) {
  // GIVEN a patch whose page can no longer become writable
  const Library victim("victim_relro_now");
  GotPatch patch = Install(ElfImage::Find(victim.path), First::Spec(kAdd));
  SealPageOf(SlotsOf(ElfImage::Find(victim.path), kAdd).at(0).address);
  // WHEN it is undone THEN Undo() counts the slot, and the replacement still works
  CHECK_EQ(patch.Undo(), 1u);
  CHECK_EQ(patch.InPlace(), 1u);
  CHECK_EQ(victim.Add(2, 3), 1005);
}

TEST(a_slot_that_is_not_aligned_is_an_error) {
  const Library victim("victim_relro_now");
  const ElfImage image = ElfImage::Find(victim.path);
  RelocationSlot slot = SlotsOf(image, kAdd).at(0);
  slot.address = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(slot.address) + 4);
  const std::string message = MessageOf([&] { GotPatch(image, First::Spec(kAdd), {slot}); });
  CHECK_CONTAINS(message, "is not aligned to 8 bytes as expected; it cannot be replaced while other threads use it");
  CHECK_EQ(First::original.load(), nullptr);
  CHECK_EQ(victim.Add(2, 3), 5);
}

TEST(a_strangers_later_patch_is_left_alone) {
  // GIVEN our patch, and another on top that calls ours
  const Library victim("victim_relro_now");
  const ElfImage image = ElfImage::Find(victim.path);
  GotPatch ours = Install(image, First::Spec(kAdd));
  PatchSpec on_top = Second::Spec(kAdd);
  on_top.expected = First::Spec(kAdd).replacement;
  GotPatch stranger = Install(image, on_top);
  CHECK_EQ(victim.Add(2, 3), 21005);
  // WHEN ours is undone first THEN Undo() counts the other's slot and does not touch it, and the other still works
  CHECK_EQ(ours.Undo(), 1u);
  CHECK_EQ(ours.InPlace(), 0u);
  CHECK_EQ(victim.Add(2, 3), 21005);
  // WHEN the other is undone, which restores ours, THEN ours can be undone, too
  CHECK_EQ(stranger.Undo(), 0u);
  CHECK_EQ(victim.Add(2, 3), 1005);
  CHECK_EQ(ours.Undo(), 0u);
  CHECK_EQ(victim.Add(2, 3), 5);
}

TEST(a_table_with_one_bad_row_is_not_installed_at_all) {
  const Library victim("victim_both");
  const ElfImage image = ElfImage::Find(victim.path);
  const std::vector<void*> contents = Contents(SlotsOf(image, kAdd));
  const std::string message = MessageOf([&] { InstallAll(image, {First::Spec(kAdd), Second::Spec(kVirtualAdd)}); });
  CHECK_CONTAINS(message, "found no slot of \"_ZNK5Adder3AddEii\"");
  CHECK(Contents(SlotsOf(image, kAdd)) == contents);
}
