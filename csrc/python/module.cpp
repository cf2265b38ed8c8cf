// The Python module torch_xla_donate._C. _C.pyi has its types, and each binding its documentation.
#include "python/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Hooks into torch_xla's lazy graph executor, and the registry of donation marks.";
  torch_xla_donate::BindHooks(m);
  torch_xla_donate::BindMarks(m);
  torch_xla_donate::BindRuns(m);
  torch_xla_donate::BindReport(m);
  torch_xla_donate::BindSwitches(m);
  torch_xla_donate::BindAuto(m);
  torch_xla_donate::BindTesting(m);
}
