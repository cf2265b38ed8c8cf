// Numbers objects by their addresses.
//
// A step looks up each edge, parameter and live tensor, so this is an open table, at most half full. It takes a third
// of the time of a general hash map, and one allocation.
//
// Threads: as a container. Errors: only std::bad_alloc, from the constructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_xla_donate {

class AddressNumbers {
 public:
  static constexpr std::uint32_t kUnknown = static_cast<std::uint32_t>(-1);

  // `most`: how many addresses will be added.
  explicit AddressNumbers(std::size_t most) {
    while ((std::size_t{1} << bits_) < 2 * most) {
      ++bits_;
    }
    slots_.resize(std::size_t{1} << bits_);
  }
  // The address gets the next number. An address that is there already keeps its first one, and null gets none.
  // Returns the number of an address that is not null.
  std::uint32_t Add(const void* address) noexcept {
    Slot& slot = slots_[Find(address)];
    if (slot.address == nullptr) {
      slot = {address, count_};
    }
    ++count_;
    return slot.number;
  }
  std::uint32_t Of(const void* address) const noexcept {
    const Slot& slot = slots_[Find(address)];
    return slot.address == nullptr ? kUnknown : slot.number;
  }

 private:
  struct Slot {  // without initialisers, so that the table is set to zeros as one block
    const void* address;
    std::uint32_t number;
  };
  // The slot of the address, or the empty slot for it.
  std::size_t Find(const void* address) const noexcept {
    constexpr std::uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;  // spreads addresses, which differ in few bits
    const Slot* const slots = slots_.data();
    std::size_t place = (reinterpret_cast<std::uintptr_t>(address) * kGoldenRatio) >> (64 - bits_);
    while (slots[place].address != nullptr && slots[place].address != address) {
      place = (place + 1) & ((std::size_t{1} << bits_) - 1);
    }
    return place;
  }

  unsigned bits_ = 4;  // a table of few addresses has room, so that a search for another one ends soon
  std::uint32_t count_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace torch_xla_donate
