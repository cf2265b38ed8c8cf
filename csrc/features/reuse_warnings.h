// Inside debug_nans() and donation_disabled(report_reuse=True): a warning at each use of a buffer that a step would
// have consumed, had donation not been disabled.
//
// The step is a dry run. Its forecast becomes donors when the outputs are known: XLA gives a donor to an output of its
// size, as size_pairing.h has it. Where the memory is seen from outside (dlpack) it does not, which is not known here.
//
// Threads: belongs to the thread that steps; ReportReuse() any. Errors: ReportReuse() throws what the callback throws.
#pragma once

#include <memory>
#include <vector>

#include "step/observer.h"

namespace torch_xla_donate {

// Calls the reuse callback if a step would have consumed the buffer; returns whether it has.
bool ReportReuse(const lazy::BackendData* buffer);
// The same for an operation, after which the tensor forgets its node: the next operation shall come by again.
void ReportReuse(const std::shared_ptr<abi::TensorData>& tensor, const lazy::BackendData* buffer);

// A run of a compiled graph would have consumed these donors.
void RememberWouldBeConsumed(RunContext& run, std::uint64_t step, const std::vector<DonorPtr>& donors);
// The donors of the thread's last step may be used: the search for the cause of a NaN needs them.
void AllowReuseOfLastStep();

}  // namespace torch_xla_donate
