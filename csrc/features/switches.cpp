// Keeps the stack of modes and the settings, and closes the gate of a step.
#include "features/switches.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "features/outdated_tensors.h"
#include "features/output_check.h"
#include "host/graphs.h"
#include "host/never_destroyed.h"
#include "host/process_mutex.h"
#include "registry/watch.h"
#include "step/callbacks.h"

namespace torch_xla_donate {

namespace {

std::atomic<bool> debug_process{false}, donates_by_default{false};

// Of the process; kSwitches guards them.
struct Settings {
  int automatic = 0;  // how many ask for automatic donation
  Reason switched_off;
};
Settings& TheSettings() { return NeverDestroyed<Settings>(); }

void CountAutomatic(int change) {
  std::lock_guard<std::mutex> lock(ProcessMutex(MutexOf::kSwitches));
  TheSettings().automatic += change;
  SetWatch(kAutomatic, TheSettings().automatic > 0 ? kAutomatic : Watch{});
}

// The modes of this thread, the innermost last.
thread_local std::vector<std::shared_ptr<const Mode>> modes;

bool Any(bool Mode::* wish) {
  return std::any_of(modes.begin(), modes.end(), [wish](const auto& mode) { return (*mode).*wish; });
}

}  // namespace

void ModeEntry::On() {
  if (std::find(modes.begin(), modes.end(), mode_) != modes.end()) {
    return;
  }
  modes.push_back(mode_);
  if (mode_->automatic.value_or(false)) {
    OutdatedTensors::FollowAliases();
    CountAutomatic(1);
  }
}

void ModeEntry::Off() {
  const auto found = std::find(modes.begin(), modes.end(), mode_);
  if (found == modes.end()) {
    return;
  }
  modes.erase(found);
  if (mode_->automatic.value_or(false)) {
    CountAutomatic(-1);
  }
  if (!ChecksOutputs()) {
    DropNotedOutputs();
  }
}

bool ReportsReuse() { return Any(&Mode::report_reuse) || debug_process.load(std::memory_order_relaxed); }
bool ChecksOutputs() { return Any(&Mode::check_outputs) || debug_process.load(std::memory_order_relaxed); }
bool ChecksInfinities() { return Any(&Mode::check_infinities); }
bool DonationDisabled() { return Any(&Mode::disabled) || ChecksOutputs(); }

Reason DisabledReason() {
  return Any(&Mode::check_outputs) ? ReasonCode::kDebugNans
         : Any(&Mode::disabled)    ? ReasonCode::kDisabled
         : DonationDisabled()      ? ReasonCode::kDebugProcess
                                   : ReasonCode::kNone;
}

void SetDebugProcess(bool on) { debug_process.store(on, std::memory_order_relaxed); }

bool AutoDonates() {
  if (!Watches(kAutomatic)) {
    return false;
  }
  const auto innermost =
      std::find_if(modes.rbegin(), modes.rend(), [](const auto& mode) { return mode->automatic.has_value(); });
  return innermost == modes.rend() ? donates_by_default.load(std::memory_order_relaxed) : *(*innermost)->automatic;
}

void SetAutoDonate(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
  }
  if (donates_by_default.exchange(on) != on) {
    CountAutomatic(on ? 1 : -1);
  }
}

void SetSwitchedOff(Reason reason) {
  std::lock_guard<std::mutex> lock(ProcessMutex(MutexOf::kSwitches));
  TheSettings().switched_off = std::move(reason);
}

Reason SwitchedOffReason() {
  std::lock_guard<std::mutex> lock(ProcessMutex(MutexOf::kSwitches));
  return TheSettings().switched_off;
}

void CloseGate(GraphContext& graph) {
  if (!graph.is_step) {
    return;
  }
  if (ReportsReuse()) {
    graph.gate.DryRun(DisabledReason());
  } else if (DonationDisabled()) {
    graph.gate.Refuse(DisabledReason(), /*notify_user=*/false);
  }
  Reason kept;  // why the token stays
  if (!graph.collection.unlocker.empty()) {
    kept = ReasonCode::kDeviceLocked;
  } else {
    try {
      if (callbacks::ForgetCollectives(abi::TorchDevice(graph.collection.device).str())) {
        SetSwitchedOff(ReasonCode::kAutoSharding);
      }
    } catch (const std::exception& error) {
      kept = {ReasonCode::kTokenKept, error.what()};
    }
  }
  if (Reason reason = SwitchedOffReason(); !reason.empty()) {
    graph.gate.Refuse(std::move(reason), /*notify_user=*/false);
  }
  if (!kept.empty()) {
    graph.gate.Refuse(std::move(kept), /*notify_user=*/true);
  }
}

}  // namespace torch_xla_donate
