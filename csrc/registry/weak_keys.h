// Forgets the objects that are gone in sets and maps whose keys are weak pointers.
//
// Threads: as the container. Errors: throws none.
#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

namespace torch_xla_donate {

template <typename T>
bool IsExpired(const std::weak_ptr<T>& key) {
  return key.expired();
}
template <typename T, typename Value>
bool IsExpired(const std::pair<const std::weak_ptr<T>, Value>& entry) {
  return entry.first.expired();
}

class Pruner {
 public:
  // Called before each insertion, it looks at the keys only when their number has doubled.
  template <typename Container>
  void Prune(Container& container) {
    if (container.size() < next_) {
      return;
    }
    for (auto it = container.begin(); it != container.end();) {
      it = IsExpired(*it) ? container.erase(it) : std::next(it);
    }
    next_ = 2 * container.size() + kLeast;
  }

 private:
  static constexpr std::size_t kLeast = 32;
  std::size_t next_ = kLeast;
};

}  // namespace torch_xla_donate
