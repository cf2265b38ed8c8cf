// Numbers objects by their addresses. A step looks up each edge, parameter and live tensor.
//
// Threads: as a container. Errors: only std::bad_alloc.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>

namespace torch_xla_donate {

class AddressNumbers {
 public:
  static constexpr std::uint32_t kUnknown = static_cast<std::uint32_t>(-1);

  // `most`: how many addresses will be added.
  explicit AddressNumbers(std::size_t most) { numbers_.reserve(most); }
  // The address gets the next number. An address that is there already keeps its first one, and null gets none.
  void Add(const void* address) {
    if (address != nullptr) {
      numbers_.emplace(address, count_);
    }
    ++count_;
  }
  std::uint32_t Of(const void* address) const {
    const auto found = numbers_.find(address);
    return found == numbers_.end() ? kUnknown : found->second;
  }

 private:
  ska::flat_hash_map<const void*, std::uint32_t> numbers_;
  std::uint32_t count_ = 0;
};

}  // namespace torch_xla_donate
