// A mark and its call, a donor, and a step with its donors. registry.h says who changes them, and when.
//
// Ownership: donors hold buffers and tensors weakly. Threads: the registry's mutex guards every member.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/graphs.h"
#include "registry/reasons.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// One call of donate_buffer(), or of a compiled function.
struct CallSite {
  std::string where;              // "train.py:12"
  bool strict = false;            // an unusable donation is an error, not a warning
  bool for_compiled_run = false;  // meant for one run of a compiled graph: steps leave the marks alone
  std::shared_ptr<void> names;    // gives a leaf its name; opaque here (a Python object, see callbacks.h)
};

// One leaf that was marked: which tensor, by which call.
struct Holder {
  std::weak_ptr<abi::TensorData> tensor;
  std::shared_ptr<const CallSite> site;
  std::uint32_t leaf = 0;
  std::weak_ptr<abi::TensorData> target;  // the output that should take the buffer over; empty without a wish
  std::weak_ptr<void> sharding;           // that the tensor had then, under SPMD
};

enum class DonorState {
  kPending,    // marked; no step has read it
  kClaimed,    // a step that reads it is being compiled or run
  kDonated,    // consumed: the memory belongs to an output of the step
  kUnusable,   // read by a step that did not use it: still alive, mark over
  kCancelled,  // taken back, or freed before a step read it
};

struct Donor {
  explicit Donor(lazy::BackendDevice where) : device(std::move(where)) {}

  std::weak_ptr<lazy::BackendData> buffer;
  c10::SmallVector<Holder, 1> holders;  // several for tied tensors
  c10::SmallVector<std::int64_t, 4> sizes;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::int64_t bytes = 0;  // of the whole array, before any sharding
  lazy::BackendDevice device;
  std::string
      array;  // of a sharded one, in a snapshot: as XLA writes it; otherwise the buffer tells, while it is there
  DonorState state = DonorState::kPending;
  Reason reason;  // why it is unusable, where this side knows; empty if XLA found no use for it
  // In the graph of the step that reads it: its number among the parameters, and that of the output computed from it.
  std::optional<std::size_t> parameter, successor;
  bool automatic = false;  // found by liveness: nobody has marked it, and there are no holders
  bool reported =
      false;  // somebody knows that it is unusable: handed out by TakeNotices(), or switched off by the user

  // "f32[8,4]"
  std::string Shape() const;
  bool HeldBy(const abi::TensorData* tensor) const;
  // The output that should take the buffer over; null if no holder has asked for one that is still there.
  std::shared_ptr<abi::TensorData> Target() const;
  // Whether any holder was marked with strict=True.
  bool Strict() const;
  // Whether all its marks are meant for a run of a compiled graph.
  bool IsForCompiledRun() const;
};
using DonorPtr = std::shared_ptr<Donor>;

// What the last run of a compiled graph did with its donors. The next run will do the same, unless a buffer is seen
// from outside (dlpack) in one of them.
struct GraphOutcome {
  std::vector<std::string> outputs;  // shapes as XLA writes them, where somebody needs them for a reason
  std::vector<bool> used;            // for each donor, in the order in which the step lists them
  std::vector<std::string> donors;   // the same: those that are sharded as XLA writes them, else empty
  std::weak_ptr<const abi::HostCachedComputation> executable;
};

// A step that read marked buffers.
struct Step {
  enum class Status { kClaimed, kRunning, kDone, kFailed };

  std::uint64_t number = 0;
  Status status = Status::kClaimed;
  std::vector<DonorPtr> donors;   // asked of XLA, in parameter order
  std::vector<DonorPtr> refused;  // read by the step, but not asked for; each with its reason
  std::string graph_hash;
  std::shared_ptr<const GraphOutcome> outcome;            // of the graph's last run, if it has run before
  std::vector<std::weak_ptr<lazy::BackendData>> outputs;  // kept until the outcome is known
  std::weak_ptr<const abi::HostCachedComputation> executable;
  std::uint64_t plain_before = 0;  // steps without donors, in this process, before this one
  bool after_backward_thread = false;
};
using StepPtr = std::shared_ptr<Step>;

// A copy for readers, so that they need no lock.
struct StepSnapshot {
  std::uint64_t number = 0;
  std::string graph_hash;
  std::string status;
  std::vector<Donor> donors;
  std::vector<std::string> outputs;
  std::uint64_t plain_before = 0;
  bool after_backward_thread = false;
};

}  // namespace torch_xla_donate
