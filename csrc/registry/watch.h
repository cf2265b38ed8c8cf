// One word of bits that most hooks check. With no bit set, such a hook is one relaxed load and a jump.
//
// Threads: any. Only its owner sets a bit, and the owner serialises its changes.
#pragma once

#include <atomic>
#include <cstdint>

namespace torch_xla_donate {

enum Watch : std::uint32_t {
  kNothing = 0,
  kMarks = 1,      // registry: a mark is pending
  kConsumed = 2,   // registry: a step has consumed a buffer that the program may still use
  kUndonated = 4,  // registry: the same, but donation was disabled
  kAutomatic = 8,  // auto_donors: some thread may donate by liveness
  kAliases = 16,   // outdated_tensors: hooks follow new aliases of tensors
  kEmpty = 32,     // placeholders: an array without memory is alive
  kInputs = 64,    // watched_inputs: notes what the inputs of steps are
};
constexpr std::uint32_t kRegistry = kMarks | kConsumed | kUndonated;
constexpr std::uint32_t kListed = kRegistry | kAutomatic | kEmpty | kInputs;  // needs the list of live tensors

inline std::atomic<std::uint32_t> watch_word{0};

inline bool Watches(std::uint32_t bits) noexcept { return (watch_word.load(std::memory_order_relaxed) & bits) != 0; }

// Sets the bits of the mask to those given.
inline void SetWatch(std::uint32_t mask, std::uint32_t bits) noexcept {
  std::uint32_t before = watch_word.load(std::memory_order_relaxed);
  while ((before & mask) != bits &&
         !watch_word.compare_exchange_weak(before, (before & ~mask) | bits, std::memory_order_relaxed)) {
  }
}

}  // namespace torch_xla_donate
