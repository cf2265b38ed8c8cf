// The switches that keep steps from donating: contexts of the program, a debugging mode of the process, a setting of
// torch_xla.
//
// While a thread's depth is above zero, its steps donate nothing of ours. Depths are counted for each wish, so that an
// inner context adds to what an outer one asks for.
//
// Threads: any; depths belong to the thread.
#pragma once

#include "registry/reasons.h"

namespace torch_xla_donate {

struct Disabling {
  bool report_reuse = false;   // uses of what would have been donated are reported
  bool check_outputs = false;  // the outputs of its runs are noted for TakeBadOutputs()
};
void PushDonationDisabled(Disabling wishes);
void PopDonationDisabled(Disabling wishes);
bool DonationDisabled();
bool ReportsReuse();
bool ChecksOutputs();
// Which of the contexts has disabled it; empty if none has.
Reason DisabledReason();
// Both wishes, for every thread.
void SetDebugProcess(bool on);

// A setting that makes torch_xla ignore every donor; empty if there is none. Process-wide.
void SetSwitchedOff(Reason reason);
Reason SwitchedOffReason();

}  // namespace torch_xla_donate
