// The executor's list of live tensors, and the reads of tensors that belong to it.
//
// A step, dynamo and debug reports make such a list and read its tensors in order, each once. A step then reads each of
// its outputs, which hold nothing, again. Any other read is the program's and ends the list.
//
// Each live tensor passes Add() and IsNextRead() in each step, so an entry is a number and an address.
//
// Ownership: owns no tensor. Threads: belongs to one thread. Errors: only std::bad_alloc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torch_xla_donate {

class LiveTensorList {
 public:
  // Clears the list. `kept` decides whether the next list is recorded. The value is fixed when that list begins, so a
  // mark made meanwhile by another thread waits for the next step.
  void Reset(bool kept) {
    kept_ = kept;
    entries_.clear();
    read_ = read_again_ = 0;
  }
  bool IsKept() const { return kept_; }

  // Appends a tensor, by its number, and the buffer that it holds.
  void Add(std::int64_t id, const void* buffer) { entries_.push_back({id, buffer}); }

  // A tensor's handle is read. Returns whether the read belongs to the list. `computes_nothing()` returns whether the
  // tensor's whole graph is device data. The executor reads the handle of such a tensor twice.
  template <typename ComputesNothing>
  bool IsListRead(std::int64_t id, bool holds_data, const ComputesNothing& computes_nothing) {
    if (IsNextRead(id)) {
      return true;
    }
    if (holds_data) {
      return false;
    }
    if (read_ > 0 && id == entries_[read_ - 1].id && computes_nothing()) {
      return true;
    }
    if (read_ == entries_.size()) {
      ++read_again_;
      return true;
    }
    return false;
  }
  // The first question of IsListRead(). Nearly all reads of a list pass it.
  bool IsNextRead(std::int64_t id) {
    const bool is_next = read_ < entries_.size() && id == entries_[read_].id;
    read_ += is_next ? 1 : 0;
    return is_next;
  }

  // Whether a graph with so many outputs belongs to the step that made the list. A partial sync that found the list of
  // another caller would have read each of its tensors twice.
  bool IsOfStep(std::size_t outputs) const { return kept_ && read_ == entries_.size() && read_again_ < 2 * outputs; }

  std::size_t Size() const { return entries_.size(); }
  // The buffer that the i-th tensor held when it was listed, only for comparison.
  const void* BufferOf(std::size_t i) const { return entries_[i].buffer; }

  // Arranges the tensors that are alive now as the list is: first the listed ones, null for those that are gone, and
  // then the others. Both come in the order of the numbers, as torch_xla lists the tensors of a device.
  template <typename Data>
  std::vector<std::shared_ptr<Data>> Arrange(std::vector<std::shared_ptr<Data>> live) const {
    const auto is_listed = [](const Entry& entry, const std::shared_ptr<Data>& tensor) {
      return entry.id == tensor->unique_id;
    };
    if (std::equal(entries_.begin(), entries_.end(), live.begin(), live.end(), is_listed)) {
      return live;
    }
    std::vector<std::shared_ptr<Data>> result(entries_.size());
    std::size_t i = 0;
    for (std::shared_ptr<Data>& tensor : live) {
      while (i < entries_.size() && entries_[i].id < tensor->unique_id) {
        ++i;
      }
      if (i < entries_.size() && is_listed(entries_[i], tensor)) {
        result[i] = std::move(tensor);
      } else {
        result.push_back(std::move(tensor));
      }
    }
    return result;
  }

 private:
  struct Entry {
    std::int64_t id;
    const void* buffer;  // compared only, never dereferenced
  };
  bool kept_ = false;
  std::vector<Entry> entries_;
  std::size_t read_ = 0;        // how many entries have been read
  std::size_t read_again_ = 0;  // how many reads have followed the list
};

}  // namespace torch_xla_donate
