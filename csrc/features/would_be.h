// What XLA would have done with the donors of a step whose donation was disabled.
//
// XLA gives a donor to an output of the same bytes on each device, and pairs those of equal bytes in their order. Where
// the memory is seen from outside (dlpack) it does not, which is not known here.
//
// Ownership: holds donors, which hold their buffers weakly. Threads: belongs to one step. Errors: none of its own.
#pragma once

#include <optional>
#include <vector>

#include "registry/registry.h"

namespace torch_xla_donate {

class WouldBe {
 public:
  WouldBe(const abi::Executor::SyncTensorCollection* step_of, std::uint64_t step_number)
      : collection(step_of), step(step_number) {}

  const abi::Executor::SyncTensorCollection* collection;  // for comparing, never followed
  std::uint64_t step;

  // Adds a parameter that would be a donor, in the graph's order; without a Donor if torch_xla donates it by itself.
  void Add(const lazy::BackendData& parameter, DonorPtr donor);
  // The donors that the outputs would have used.
  std::vector<DonorPtr> Used(const std::vector<lazy::BackendDataPtr>& outputs) const;

 private:
  struct Parameter {
    std::optional<std::int64_t> bytes;  // per device
    DonorPtr donor;
  };
  std::vector<Parameter> parameters_;
};

}  // namespace torch_xla_donate
