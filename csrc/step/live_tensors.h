// The list of live tensors that the executor makes, as far as this package follows it.
//
// Whoever has made a list (a step, dynamo, a debug report) goes through it from its beginning to its end, each tensor
// once, and must not be disturbed. A step then asks each of its outputs, which hold nothing, once more. Anybody else
// reads a tensor, and the list is of no use any more.
//
// A template, so that it can be tested without torch.
//
// Ownership: holds tensors weakly. Threads: belongs to one thread. Errors: none of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_xla_donate {

template <typename Data, typename Buffer>
class LiveTensorList {
 public:
  // Forgets the list; `kept` tells whether another one is kept from here on. Decided when it begins: a mark that
  // another thread makes meanwhile waits for the next step.
  void Reset(bool kept) {
    kept_ = kept;
    entries_.clear();
    newest_ = 0;
    asked_ = asked_again_ = 0;
  }
  bool IsKept() const { return kept_; }

  // The next tensor of the list, what it holds, and its number.
  void Add(const std::shared_ptr<Data>& tensor, const Buffer* buffer, std::int64_t id) {
    entries_.push_back({tensor, tensor.get(), buffer});
    newest_ = std::max(newest_, id);
  }

  // A tensor is asked for what it holds. Whether that belongs to the list. `computes_nothing()` tells whether the
  // tensor's whole graph is device data: it gets that for its handle on the way, which asks it once more.
  template <typename ComputesNothing>
  bool IsAsked(const Data* tensor, bool holds_data, const ComputesNothing& computes_nothing) {
    if (asked_ < entries_.size() && tensor == entries_[asked_].data) {
      ++asked_;
      return true;
    }
    if (holds_data) {
      return false;
    }
    if (asked_ > 0 && tensor == entries_[asked_ - 1].data && computes_nothing()) {
      return true;
    }
    if (asked_ == entries_.size()) {
      ++asked_again_;
      return true;
    }
    return false;
  }

  // Whether a graph with so many outputs is that of the step that made the list: a partial sync that came upon the list
  // of somebody else would have asked its tensors twice.
  bool IsOfStep(std::size_t outputs) const { return kept_ && asked_ == entries_.size() && asked_again_ < 2 * outputs; }

  // In the executor's order; null for what has gone since.
  std::vector<std::shared_ptr<Data>> Tensors() const {
    std::vector<std::shared_ptr<Data>> result;
    result.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      result.push_back(entry.tensor.lock());
    }
    return result;
  }
  // What the i-th tensor held when it was listed, for comparing.
  const Buffer* BufferOf(std::size_t i) const { return entries_[i].buffer; }
  // The highest number among them.
  std::int64_t Newest() const { return newest_; }

 private:
  struct Entry {
    std::weak_ptr<Data> tensor;
    const Data* data;      // the same for comparing, never followed
    const Buffer* buffer;  // likewise
  };
  bool kept_ = false;
  std::vector<Entry> entries_;
  std::int64_t newest_ = 0;
  std::size_t asked_ = 0;        // how many of them have been asked for what they hold
  std::size_t asked_again_ = 0;  // how many questions have followed
};

}  // namespace torch_xla_donate
