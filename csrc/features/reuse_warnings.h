// Inside debug_nans() and donation_disabled(report_reuse=True), warns at each use of a buffer that a step would have
// consumed if donation were enabled.
//
// The step is a dry run. When the outputs are known, size_pairing.h gives the donors that XLA would have used. XLA uses
// no donor whose memory is exported (dlpack), which is not known here.
//
// Threads: belongs to the thread that steps; any thread may call ReportReuse().
// Errors: ReportReuse() throws the callback's exceptions.
#pragma once

#include <memory>
#include <vector>

#include "step/phases.h"

namespace torch_xla_donate {

// Calls the reuse callback if a step would have consumed the buffer. Returns whether it did.
bool ReportReuse(const lazy::BackendData* buffer);
// The same for an operation. The tensor then forgets its node, so that the next operation is reported, too.
void ReportReuse(const std::shared_ptr<abi::TensorData>& tensor, const lazy::BackendData* buffer);

// A run of a compiled graph would have consumed these donors.
void NoteUndonated(RunContext& run, std::uint64_t step, const std::vector<DonorPtr>& donors);
// The program may use the donors of the thread's last step, to search for the cause of a NaN.
void AllowReuseOfLastStep();

// ---- Phases of a step ----

// A new step begins.
void EndReuse();
// The next operation on the tensors of reported operations is reported, too.
void ForgetReused();
void NoteDryRun(RunContext& run);

}  // namespace torch_xla_donate
