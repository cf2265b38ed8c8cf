// Patching while other threads call through the slots.
#include <thread>

#include "check.h"
#include "hooks.h"

namespace {

constexpr int kRounds = 10'000;

// Returns how many slots some Undo() could not restore. An exception ends the program, because none is expected here.
std::size_t InstallAndUndo(const ElfImage& image, const PatchSpec& spec, int rounds) {
  const std::vector<RelocationSlot> slots = SlotsOf(image, spec.symbol);
  std::size_t left = 0;
  for (int round = 0; round < rounds; ++round) {
    GotPatch patch(image, spec, slots);
    left += patch.Undo();
  }
  return left;
}

void CallWhilePatching(const std::string& mode, const char* symbol) {
  // GIVEN threads that call through the slot without a pause
  const Library victim(VictimName(mode));
  const ElfImage image = ElfImage::Find(victim.path);
  const auto add = reinterpret_cast<int (*)(int, int)>(victim.Symbol("victim_add"));
  CHECK_EQ(add(2, 3), 5);
  std::atomic<long> original{0}, replaced{0}, wrong{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      while (!stop.load()) {
        const int result = add(2, 3);
        ++(result == 5 ? original : result == 1005 ? replaced : wrong);
      }
    });
  }
  // WHEN the patch is installed and undone repeatedly
  std::size_t left = InstallAndUndo(image, First::Spec(symbol), kRounds);
  while (original == 0 || replaced == 0) {  // the callers have not run yet
    left += InstallAndUndo(image, First::Spec(symbol), 100);
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  // THEN each call has returned one of the two right results, and both occurred
  std::cout << original << " calls of the original, " << replaced << " of the replacement" << std::endl;
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(left, 0u);
  CHECK_EQ(add(2, 3), 5);
}

}  // namespace

TEST(callers_see_one_of_two_results_through_a_read_only_slot) { CallWhilePatching("relro_now", kAdd); }
TEST(callers_see_one_of_two_results_through_a_writable_slot) { CallWhilePatching("relro_lazy", kAdd); }
TEST(callers_see_one_of_two_results_through_a_vtable) { CallWhilePatching("vtable", kVirtualAdd); }

TEST(neighbours_on_one_page_may_be_patched_at_the_same_time) {
  // GIVEN two functions with slots in one read-only page
  const Library victim("victim_relro_now");
  const ElfImage image = ElfImage::Find(victim.path);
  const std::string protections = ProtectionsOf(victim.path);
  const PatchSpec add = First::Spec(kAdd), multiply = Second::Spec(kMultiply);
  // WHEN two threads patch one each, again and again
  std::size_t left_by_other = 0;
  std::thread other([&] { left_by_other = InstallAndUndo(image, multiply, kRounds); });
  const std::size_t left = InstallAndUndo(image, add, kRounds);
  other.join();
  // THEN neither has write-protected the page while the other wrote to it
  CHECK_EQ(left, 0u);
  CHECK_EQ(left_by_other, 0u);
  CHECK_EQ(ProtectionsOf(victim.path), protections);
  CHECK_EQ(victim.Add(2, 3), 5);
  CHECK_EQ(victim.Multiply(2, 3), 6);
}
