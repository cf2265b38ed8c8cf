// Remembers the placeholders that are alive, and has the hooks watch while there are any.
#include "features/placeholders.h"

#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "host/process_mutex.h"
#include "registry/watch.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

struct Known {
  std::mutex& mutex = ProcessMutex(MutexOf::kPlaceholders);
  std::unordered_map<const lazy::BackendData*, std::weak_ptr<lazy::BackendData>> arrays;
};
Known& Placeholders() {
  static auto* known = new Known();
  return *known;
}

class PlaceholderGuard : public StepObserver {
  // Reads of a list of live tensors are not uses, and only a recorded list is recognized.
  bool NeedsLiveTensors(void*, const lazy::BackendDevice*) override {
    if (!Watches(kEmpty)) {
      return false;
    }
    Known& known = Placeholders();
    const std::lock_guard<std::mutex> lock(known.mutex);
    for (auto entry = known.arrays.begin(); entry != known.arrays.end();) {
      entry = entry->second.expired() ? known.arrays.erase(entry) : std::next(entry);
    }
    if (known.arrays.empty()) {
      SetWatch(kEmpty, 0);
    }
    return !known.arrays.empty();
  }
  // A node that a trace has left behind passes no other hook.
  void CheckRun(const std::vector<lazy::BackendDataPtr>& parameters) override {
    for (const lazy::BackendDataPtr& parameter : parameters) {
      ThrowIfPlaceholder(parameter.get());
    }
  }
};

}  // namespace

StepObserver& PlaceholderFeature() { return TheOnly<PlaceholderGuard>(); }

void NotePlaceholder(const lazy::BackendDataPtr& array) {
  Known& known = Placeholders();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.arrays.insert_or_assign(array.get(), array);
  SetWatch(kEmpty, kEmpty);
}

void ThrowIfPlaceholder(const lazy::BackendData* array) {
  if (!Watches(kEmpty)) {
    return;
  }
  Known& known = Placeholders();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.arrays.find(array);
  if (found != known.arrays.end() && !found->second.expired()) {
    throw std::runtime_error(
        "A placeholder has no value, so only lower() can use it. Give it to lower() as it is, and compute with it in "
        "the function that is lowered. See `python -m torch_xla_donate explain ahead`.");
  }
}

}  // namespace torch_xla_donate
