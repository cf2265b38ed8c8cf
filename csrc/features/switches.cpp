// Closes the gate of a step. The verdict of a later switch wins.
#include "features/switches.h"

#include <atomic>
#include <utility>

#include "features/output_check.h"
#include "host/process_mutex.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

std::atomic<bool> debug_process{false};

struct Depths {
  int disabled = 0, reporting = 0, checking = 0;
};
Depths& ThisThread() {
  thread_local Depths depths;
  return depths;
}

struct Setting {
  std::mutex& mutex = ProcessMutex(MutexOf::kSwitchedOff);
  Reason reason;
};
Setting& TheSetting() {
  static Setting* value = new Setting();
  return *value;
}

class Switches : public StepObserver {
  void BeforeGraph(GraphContext& graph) override {
    if (!graph.is_step) {
      return;
    }
    if (ReportsReuse()) {
      graph.gate.DryRun(DisabledReason());
    } else if (DonationDisabled()) {
      graph.gate.Refuse(DisabledReason(), /*notify_user=*/false);
    }
    if (Reason reason = SwitchedOffReason(); !reason.empty()) {
      graph.gate.Refuse(std::move(reason), /*notify_user=*/false);
    }
  }
};

}  // namespace

StepObserver& SwitchesFeature() { return TheOnly<Switches>(); }

void PushDonationDisabled(Disabling wishes) {
  Depths& depths = ThisThread();
  ++depths.disabled;
  depths.reporting += wishes.report_reuse ? 1 : 0;
  depths.checking += wishes.check_outputs ? 1 : 0;
}

void PopDonationDisabled(Disabling wishes) {
  Depths& depths = ThisThread();
  --depths.disabled;
  depths.reporting -= wishes.report_reuse ? 1 : 0;
  depths.checking -= wishes.check_outputs ? 1 : 0;
  if (!ChecksOutputs()) {
    DropNotedOutputs();
  }
}

bool ReportsReuse() { return ThisThread().reporting > 0 || debug_process.load(std::memory_order_relaxed); }
bool ChecksOutputs() { return ThisThread().checking > 0 || debug_process.load(std::memory_order_relaxed); }
bool DonationDisabled() { return ThisThread().disabled > 0 || ChecksOutputs(); }

Reason DisabledReason() {
  const Depths& depths = ThisThread();
  return depths.checking > 0   ? ReasonCode::kDebugNans
         : depths.disabled > 0 ? ReasonCode::kDisabled
         : DonationDisabled()  ? ReasonCode::kDebugProcess
                               : ReasonCode::kNone;
}

void SetDebugProcess(bool on) { debug_process.store(on, std::memory_order_relaxed); }

void SetSwitchedOff(Reason reason) {
  std::lock_guard<std::mutex> lock(TheSetting().mutex);
  TheSetting().reason = std::move(reason);
}

Reason SwitchedOffReason() {
  std::lock_guard<std::mutex> lock(TheSetting().mutex);
  return TheSetting().reason;
}

}  // namespace torch_xla_donate
