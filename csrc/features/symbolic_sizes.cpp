// Notes the nodes of symbolic sizes.
#include "features/symbolic_sizes.h"

#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "host/graphs.h"
#include "host/process_mutex.h"
#include "registry/weak_keys.h"

namespace torch_xla_donate {

namespace {

Original constructor;

struct Notes {
  std::mutex& mutex = ProcessMutex(MutexOf::kSymbolicSizes);
  std::set<std::weak_ptr<lazy::Node>, std::owner_less<>> nodes;
  Pruner pruner;
  std::string obstacle;  // why a node is missing
};

// Never destroyed: hooks may run until the process ends.
Notes& TheNotes() {
  static Notes* const notes = new Notes();
  return *notes;
}

void Note(const c10::SymNodeImpl& size) {
  Notes& notes = TheNotes();
  std::string obstacle;
  std::shared_ptr<lazy::Node> node;  // released without the lock: it may be the last owner of a graph
  try {
    node = abi::NodeOfSize(size);
  } catch (const std::exception& error) {
    obstacle = error.what();
  }
  const std::lock_guard<std::mutex> lock(notes.mutex);
  if (!obstacle.empty()) {
    notes.obstacle = std::move(obstacle);
  }
  if (node == nullptr) {
    return;
  }
  notes.pruner.Prune(notes.nodes);
  notes.nodes.insert(node);
}

// Torch copies a SymInt through the same constructor, and a tracer makes other SymInts.
void Constructor(c10::SymInt* self, c10::SymNode& size) {
  if (size) {
    Note(*size);
  }
  constructor.As<abi::SymIntConstructorFn>()(self, size);
}

}  // namespace

Hook SymbolicSizeHook() {
  return {"SymInt::SymInt",
          HookedLibrary::kExtension,
          {abi::kSymIntConstructor},
          reinterpret_cast<void*>(&Constructor),
          &constructor,
          "notes the graph of a size that only the device knows"};
}

std::vector<lazy::NodePtr> SymbolicSizes() {
  std::vector<lazy::NodePtr> found;
  Notes& notes = TheNotes();
  const std::lock_guard<std::mutex> lock(notes.mutex);
  found.reserve(notes.nodes.size());
  for (const std::weak_ptr<lazy::Node>& noted : notes.nodes) {
    if (lazy::NodePtr node = noted.lock()) {
      found.push_back(std::move(node));
    }
  }
  return found;
}

Reason SymbolicSizesObstacle() {
  Notes& notes = TheNotes();
  const std::lock_guard<std::mutex> lock(notes.mutex);
  return notes.obstacle.empty() ? Reason() : Reason(ReasonCode::kUnsupported, notes.obstacle);
}

}  // namespace torch_xla_donate
