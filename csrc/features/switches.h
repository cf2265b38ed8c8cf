// The switches that keep steps from donating: contexts, a debugging mode of the process, a setting of torch_xla.
//
// While a thread's depth is above zero, this package donates nothing in its steps. Each wish has a separate depth, so
// an inner context adds to the wishes of the outer one.
//
// Threads: any; depths belong to the thread.
#pragma once

#include "registry/reasons.h"

namespace torch_xla_donate {

struct Disabling {
  bool report_reuse = false;   // report uses of buffers that would have been donated
  bool check_outputs = false;  // note the outputs of its runs for TakeBadOutputs()
};
void PushDonationDisabled(Disabling wishes);
void PopDonationDisabled(Disabling wishes);
bool DonationDisabled();
bool ReportsReuse();
bool ChecksOutputs();
// The context that has disabled donation; empty if none has.
Reason DisabledReason();
// Both wishes, for every thread.
void SetDebugProcess(bool on);

// The setting that makes torch_xla ignore every donor, for the process; empty if there is none.
void SetSwitchedOff(Reason reason);
Reason SwitchedOffReason();

}  // namespace torch_xla_donate
