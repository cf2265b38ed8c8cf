// Forgets the objects that are gone: in sets and maps whose keys are weak pointers, and in hash maps.
//
// Threads: as the container. Errors: throws none.
#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <new>
#include <utility>

#include "registry/thread_safety.h"

namespace torch_xla_donate {

template <typename T>
bool IsExpired(const std::weak_ptr<T>& key) {
  return key.expired();
}
template <typename T, typename Value>
bool IsExpired(const std::pair<const std::weak_ptr<T>, Value>& entry) {
  return entry.first.expired();
}

// Removes the entries for which `is_gone(value)` holds. Each call reads the whole table, and a table keeps the size of
// its fullest hour. So one that has been nearly empty since the last call gives its memory back.
template <typename Map, typename IsGone>
void ForgetGone(Map& map, const IsGone& is_gone) noexcept REQUIRES(registry_mutex) {
  constexpr std::size_t kSmall = 1024, kSparse = 32;
  const std::size_t before = map.size();
  if (before > 0) {
    for (auto it = map.begin(); it != map.end();) {
      it = is_gone(it->second) ? map.erase(it) : std::next(it);
    }
  }
  if (map.bucket_count() > kSmall && before * kSparse < map.bucket_count()) {
    try {
      map.rehash(0);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it keeps its size
    }
  }
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
