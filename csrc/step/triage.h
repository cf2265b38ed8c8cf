// Finds the donors of a step that another live tensor needs. Uses neither torch nor XLA, only positions and addresses.
//
// Threads: a function of its arguments. Errors: throws none itself.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace torch_xla_donate {

enum class Obstacle { kNone, kViewed, kShared };

// A live tensor that holds a buffer.
struct BufferHolder {
  const void* tensor;
  const void* buffer;
  bool is_viewed;  // it is a view, or has views, that share its graph
};

// Returns for each requested buffer the obstacle to its donation. `is_offered(i, tensor)` returns whether the tensor
// was marked, too. Linear in both lists.
template <typename IsOffered>
std::vector<Obstacle> FindObstacles(const std::vector<const void*>& asked, const std::vector<BufferHolder>& holders,
                                    const IsOffered& is_offered) {
  std::vector<Obstacle> obstacles(asked.size(), Obstacle::kNone);
  std::unordered_map<const void*, std::size_t> position_of;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    position_of.emplace(asked[i], i);
  }
  for (const BufferHolder& holder : holders) {
    const auto found = position_of.find(holder.buffer);
    if (found == position_of.end()) {
      continue;
    }
    if (holder.is_viewed) {
      obstacles[found->second] = Obstacle::kViewed;
    } else if (!is_offered(found->second, holder.tensor)) {
      obstacles[found->second] = Obstacle::kShared;
    }
  }
  return obstacles;
}

}  // namespace torch_xla_donate
