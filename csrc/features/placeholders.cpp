// Compares the parameters of each run with the placeholders that are alive.
#include "features/placeholders.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "step/observer.h"

namespace torch_xla_donate {

namespace {

struct Known {
  std::atomic<bool> any{false};  // once all placeholders are gone, a run costs one load
  std::mutex mutex;
  std::unordered_map<const lazy::BackendData*, std::weak_ptr<lazy::BackendData>> arrays;
  std::size_t sweep_at = 64;  // arrays that are gone leave the map when it has doubled
};
Known& Placeholders() {
  static auto* known = new Known();
  return *known;
}

void Sweep(Known& known) {
  for (auto entry = known.arrays.begin(); entry != known.arrays.end();) {
    entry = entry->second.expired() ? known.arrays.erase(entry) : std::next(entry);
  }
  known.sweep_at = 2 * known.arrays.size() + 64;
}

class PlaceholderGuard : public StepObserver {
  void CheckRun(const std::vector<lazy::BackendDataPtr>& parameters) override {
    Known& known = Placeholders();
    if (!known.any.load(std::memory_order_relaxed)) {
      return;
    }
    const std::lock_guard<std::mutex> lock(known.mutex);
    Sweep(known);
    known.any.store(!known.arrays.empty(), std::memory_order_relaxed);
    for (const lazy::BackendDataPtr& parameter : parameters) {
      const auto found = known.arrays.find(parameter.get());
      if (found != known.arrays.end()) {  // swept, so it is the same array
        throw std::runtime_error(
            "A step reads a placeholder, which has no value. Give placeholders to lower() only. See `python -m "
            "torch_xla_donate explain ahead`.");
      }
    }
  }
};

}  // namespace

StepObserver& PlaceholderFeature() { return TheOnly<PlaceholderGuard>(); }

void NotePlaceholder(const lazy::BackendDataPtr& array) {
  Known& known = Placeholders();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (known.arrays.size() >= known.sweep_at) {
    Sweep(known);
  }
  known.arrays.insert_or_assign(array.get(), array);
  known.any.store(true, std::memory_order_relaxed);
}

}  // namespace torch_xla_donate
