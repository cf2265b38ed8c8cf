// The switches that decide how steps donate: contexts of a thread, settings of the process, a setting of torch_xla.
//
// A thread has one stack of modes, one for each context that it is inside (donation_disabled, debug_nans, auto_donate).
// A mode adds to what the outer ones ask for. Of those that say whether to donate automatically, the innermost counts.
//
// Threads: any. A mode belongs to the thread that switches it on; Off() on another thread does nothing.
#pragma once

#include <memory>
#include <optional>

#include "step/phases.h"

namespace torch_xla_donate {

struct Mode {
  std::optional<bool> automatic;  // steps donate by liveness, or not
  bool disabled = false;          // steps donate nothing
  bool report_reuse = false;      // uses of buffers that would have been donated are reported
  bool check_outputs = false;     // the outputs of runs are noted for TakeBadOutputs()
  bool check_infinities = false;  // which looks for infinities, too
};

// One entry of the stack. Both functions may be repeated.
class ModeEntry {
 public:
  explicit ModeEntry(Mode mode) : mode_(std::make_shared<const Mode>(mode)) {}
  void On();
  void Off();

 private:
  std::shared_ptr<const Mode> mode_;
};

bool DonationDisabled();
bool ReportsReuse();
bool ChecksOutputs();
bool ChecksInfinities();
// The context that has disabled donation; empty if none has.
Reason DisabledReason();
// Reports reuse and checks outputs in every thread.
void SetDebugProcess(bool on);

// Whether this thread's steps donate by liveness; by default, for all threads.
bool AutoDonates();
void SetAutoDonate(bool on);

// The setting that makes torch_xla ignore every donor, for the process; empty if there is none.
void SetSwitchedOff(Reason reason);
Reason SwitchedOffReason();

// ---- Phases of a step ----

// Closes the gate of a step that donates nothing. First drops the token that orders a step's collectives; the gate
// closes if it stays.
//
// The token depends on the inputs of the step, so a collective of a later step would read them through it.
// torch_xla.sync() drops the token after the step closures; a plain sync of the live tensors keeps it. Here the graph
// of the step is complete, so the token is not needed. The executor does not hold a lock yet that a thread with the GIL
// could wait for.
void CloseGate(GraphContext& graph);

}  // namespace torch_xla_donate
