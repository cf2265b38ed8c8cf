// The executor's list of live tensors, and the reads of tensors that belong to it.
//
// A step, dynamo and debug reports make such a list and read its tensors in order, each once. A step then reads each of
// its outputs, which hold nothing, again. Any other read is the program's and ends the list.
//
// A template, so that tests need no torch.
//
// Ownership: holds tensors weakly. Threads: belongs to one thread. Errors: throws none itself.
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
  // Clears the list. `kept` decides whether the next list is recorded. The value is fixed when that list begins, so a
  // mark made meanwhile by another thread waits for the next step.
  void Reset(bool kept) {
    kept_ = kept;
    entries_.clear();
    newest_ = 0;
    read_ = read_again_ = 0;
  }
  bool IsKept() const { return kept_; }

  // Appends a tensor, the buffer that it holds, and its number.
  void Add(const std::shared_ptr<Data>& tensor, const Buffer* buffer, std::int64_t id) {
    entries_.push_back({tensor, tensor.get(), buffer});
    newest_ = std::max(newest_, id);
  }

  // A tensor's handle is read. Returns whether the read belongs to the list. `computes_nothing()` returns whether the
  // tensor's whole graph is device data. The executor reads the handle of such a tensor twice.
  template <typename ComputesNothing>
  bool IsListRead(const Data* tensor, bool holds_data, const ComputesNothing& computes_nothing) {
    if (read_ < entries_.size() && tensor == entries_[read_].data) {
      ++read_;
      return true;
    }
    if (holds_data) {
      return false;
    }
    if (read_ > 0 && tensor == entries_[read_ - 1].data && computes_nothing()) {
      return true;
    }
    if (read_ == entries_.size()) {
      ++read_again_;
      return true;
    }
    return false;
  }

  // Whether a graph with so many outputs belongs to the step that made the list. A partial sync that found the list of
  // another caller would have read each of its tensors twice.
  bool IsOfStep(std::size_t outputs) const { return kept_ && read_ == entries_.size() && read_again_ < 2 * outputs; }

  // In the executor's order; null for freed tensors.
  std::vector<std::shared_ptr<Data>> Tensors() const {
    std::vector<std::shared_ptr<Data>> result;
    result.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      result.push_back(entry.tensor.lock());
    }
    return result;
  }
  // The buffer that the i-th tensor held when it was listed, only for comparison.
  const Buffer* BufferOf(std::size_t i) const { return entries_[i].buffer; }
  // The highest number of a listed tensor.
  std::int64_t Newest() const { return newest_; }

 private:
  struct Entry {
    std::weak_ptr<Data> tensor;
    const Data* data;      // the same address; compared only, never dereferenced
    const Buffer* buffer;  // compared only, never dereferenced
  };
  bool kept_ = false;
  std::vector<Entry> entries_;
  std::int64_t newest_ = 0;
  std::size_t read_ = 0;        // how many entries have been read
  std::size_t read_again_ = 0;  // how many reads have followed the list
};

}  // namespace torch_xla_donate
