// Looks buffers up in the registry, and raises.
#include "features/use_guard.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/ir_util.h>

#include "features/reuse_warnings.h"
#include "features/run_guard.h"
#include "registry/steps.h"
#include "registry/watch.h"
#include "step/callbacks.h"

namespace torch_xla_donate {

PyObject* DonatedBufferAccess::python_type() { return callbacks::DonatedBufferError(); }

void ThrowIfConsumed(const lazy::BackendData* buffer) {
  Steps& steps = Steps::Get();
  if (!steps.IsTracked(buffer)) {
    return;
  }
  std::optional<ConsumedDonor> found;
  {
    PyThreadState* const thread = Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
    const auto restored = c10::make_scope_exit([thread] {
      if (thread != nullptr) {
        PyEval_RestoreThread(thread);
      }
    });
    found = steps.FindConsumed(buffer);
  }
  if (found.has_value()) {
    throw DonatedBufferAccess(callbacks::DescribeUse(found->donor, found->step));
  }
}

bool IsGone(const lazy::BackendData* buffer) {
  return Watches(kRegistry) &&
         (Steps::Get().IsTracked(buffer) || (Watches(kUndonated) && Steps::Get().FindUndonated(buffer).has_value()));
}

void CheckRead(const lazy::BackendData* buffer) {
  if (!BlocksRuns()) {  // a trace may compute with placeholders
    ThrowIfPlaceholder(buffer);
  }
  if (IsGone(buffer)) {
    ThrowIfConsumed(buffer);
    ReportReuse(buffer);
  }
}

void ThrowIfReadsConsumed(const std::vector<lazy::Value>& roots) {
  if (!Watches(kConsumed) || Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    return;
  }
  std::vector<const lazy::Node*> nodes;
  for (const lazy::Value& root : roots) {
    nodes.push_back(root.node.get());
  }
  for (const lazy::Node* node : lazy::Util::ComputePostOrder(nodes)) {
    ThrowIfConsumed(lazy::getBackend()->GetComputationDataFromNode(node).get());
  }
}

void CheckUse(const lazy::LazyTensor& tensor, const lazy::BackendData* buffer) {
  ThrowIfConsumed(buffer);
  if (Watches(kUndonated)) {
    ReportReuse(tensor.data(), buffer);
  }
}

}  // namespace torch_xla_donate
