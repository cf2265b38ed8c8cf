// The intercepts: where torch_xla's lazy graph executor passes through this package, and the one table of them.
//
// A step (torch_xla.sync(), xm.mark_step()) passes the intercepts in this order:
//   ForAllDeviceContexts     the executor lists the live tensors
//   LazyTensor::LazyTensor   ... as fresh objects, which are noted
//   CurrentDataHandle        asked of every live tensor; outside a step, whoever reads a tensor comes through here
//   RunPostOrder             the token of collectives is dropped; then the graph and its parameters are known: donors
//                            are chosen and put into the donor set
//   TensorCollectionBarrier  compiled, about to be scheduled: the rewritten infos are given back
//   Async::Async             the commit point: this graph will run with these parameters; debug_nans notes its outputs
//   MultiWait::Completer     gives the function that runs the graph: what became of the donors is read at its end
//   MarkStep                 the step is over: unusable donations are told, noted outputs checked
// and CreateTensorNode is how an op first uses a materialised tensor.
//
// Ownership: the patches belong to this file; Uninstall() or the end of the process undoes them.
// Threads: Install() and Uninstall() may be called from any thread; what belongs to a step is kept per thread.
// Errors: Install() throws std::runtime_error and leaves nothing behind. Inside a hook the only exceptions of ours are
//   DonatedBufferAccess, where somebody touches a donated tensor, what the callbacks throw that may, and what the step
//   callback throws at the end of a step. All else is caught, and the step runs without donation.
// Signals: Python runs a handler, which may raise, before the next bytecode, and that may be one of a callback. So each
//   callback passes on what is raised in it, or runs no bytecode.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "features/output_check.h"
#include "registry/registry.h"
#include "step/hooks.h"

namespace torch_xla_donate {

// The rows of the table of hooks that this file implements.
std::vector<Hook> ExecutorHooks();

// What the Python side lends to the hooks. Each is set once, before the hooks are installed.
struct HookCallbacks {
  PyObject* donated_buffer_error = nullptr;  // exception type, immortal
  // The message for a use of a consumed buffer. Called without locks; may take the GIL and throw.
  std::function<std::string(const Donor&, std::uint64_t step)> describe_use;
  // Called where somebody uses a buffer that a step would have consumed, had donation not been disabled. Called without
  // locks; may take the GIL and throw.
  std::function<void(const Donor&, std::uint64_t step)> report_reuse;
  // Called before the first list of live tensors that automatic donation needs: verifies what it relies on. Returns why
  // nothing can be donated automatically in this process; empty if it can. May take the GIL and throw: then the step is
  // not begun, and the next one asks again.
  std::function<Reason()> prepare_auto;
  // Called before the donors of a step are chosen: drops the token that orders the collectives of a device, by its
  // name, and looks whether auto-sharding is on by now. Called without locks; may take the GIL, but runs no bytecode;
  // if it throws, nothing is donated.
  std::function<void(const std::string& device)> forget_collectives;
  // Called at the end of a step when there is something to tell or to check. May take the GIL and throw.
  std::function<void()> step_ended;
};
void SetHookCallbacks(HookCallbacks callbacks);

// Use of a donated buffer. Ops raise it as DonatedBufferError; pybind11 functions of torch_xla do by way of the
// translator that callbacks.cpp registers.
struct DonatedBufferAccess : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override;
};

// Throws DonatedBufferAccess if a step has consumed the buffer. Waits for the step where its outcome is not known yet.
void ThrowIfConsumed(const lazy::BackendData* buffer);

// Until the matching TakeOrder() the graphs that this thread hashes or compiles have their parameters in an order with
// which XLA gives each of these donors to the output computed from it. TakeOrder() describes the last of these graphs.
struct OrderedParameter {
  const lazy::BackendData* buffer;
  std::optional<std::size_t> successor;  // the output computed from it, if it is a donor
};
void OrderParameters(std::unordered_set<const lazy::BackendData*> donors);
std::vector<OrderedParameter> TakeOrder();

// The next run of a compiled graph on this thread (torch.compile's, or a replay) consumes the buffers given, which are
// marked by the call; the graph has been compiled with exactly them as donors. Ends with DisarmRun().
struct RunDonor {
  lazy::BackendDataPtr buffer;
  std::optional<std::size_t> parameter, successor;  // as in Donor
};
void ArmRun(std::shared_ptr<const CallSite> call, std::vector<RunDonor> donors, std::string graph);
void DisarmRun();

// The next run of a compiled graph on this thread is described and not run: an exception of the class InspectedRun ends
// it. Ends with TakeInspected(), which gives nothing if no run came.
struct InspectedRun : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void InspectNextRun();
std::optional<abi::CompiledGraph> TakeInspected();

// The registry has a step for the next run of this thread already: its donors were refused beforehand.
void ExpectRun();

// While a thread's runs are refused, a graph that it is about to run makes std::runtime_error. torch_xla has a switch
// for this, which would stop the steps of all other threads, too.
void RefuseRuns(bool on);
// How many graphs this thread has begun to run.
std::uint64_t RunsBegun();
// How often this thread has passed the barrier that stands before every read and every run, while its runs were
// refused.
std::uint64_t BarriersPassed();

// Throws std::runtime_error if torch_xla's executor is not laid out as expected, or has not passed a hook yet.
void VerifyExecutor(bool eager_mode, bool allow_execution);

// The device that this thread has stepped last, or that NoteDevice() has been told of since; none if there is none.
void NoteDevice(const lazy::BackendDevice& device);
std::optional<lazy::BackendDevice> LastDevice();

// The data of this thread's last list of live tensors, as long as nothing has happened since.
std::vector<std::shared_ptr<abi::TensorData>> ListedTensors();

// Calls the reuse callback if a step would have consumed the buffer; returns whether it has.
bool ReportReuse(const lazy::BackendData* buffer);

// While a thread's depth is above zero, its steps donate nothing of ours. Depths are counted for each wish, so that an
// inner context adds to what an outer one asks for.
struct Disabling {
  bool report_reuse = false;   // uses of what would have been donated are told
  bool check_outputs = false;  // the outputs of its runs are noted for TakeBadOutputs()
};
void PushDonationDisabled(Disabling wishes);
void PopDonationDisabled(Disabling wishes);
bool DonationDisabled();
// Who has disabled it; empty if nobody has.
Reason DisabledReason();
// Both wishes, for every thread.
void SetDebugProcess(bool on);

// Whether other processes run the same program, whose steps must have the same donors.
void SetOneOfMany(bool on);

// The outputs of this thread's runs since the last call that hold a NaN or, if asked for, an infinity. Waits for the
// device; the caller must not hold the GIL. If there are any, the donors of the thread's last step may be used again:
// whoever looks for the cause needs them.
std::vector<BadOutput> TakeBadOutputs(bool infs);

// Whether steps donate by liveness: on all threads, or on this one, where the last push counts before that.
void SetAutoDonate(bool on);
bool AutoDonateIsDefault();
void PushAutoDonate(bool on);
std::size_t AutoDonateDepth();
void PopAutoDonate(std::size_t depth);
bool AutoDonates();

// A setting that makes torch_xla ignore every donor; empty if there is none. Process-wide.
void SetSwitchedOff(Reason reason);
Reason SwitchedOffReason();

}  // namespace torch_xla_donate
