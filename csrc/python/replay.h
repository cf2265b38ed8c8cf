// A call of a traced function whose arguments are like those of an earlier call, as in each step of a training loop.
//
// One walk compares the structure of the arguments, and one pass over the leaves compares these and finds the donated
// ones, which are then marked. A call that differs in anything takes the general way, which has the messages.
//
// The caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/call.h"
#include "python/pytree.h"

namespace torch_xla_donate {

namespace py = pybind11;

class Replay {
 public:
  // Of a donated leaf: its number, that of its parameter, and that of the output computed from it.
  using Donated = std::tuple<std::size_t, std::optional<std::size_t>, std::optional<std::size_t>>;
  // A call that has marked its donated leaves and armed the run.
  struct Begun : Call {
    py::list leaves;
    bool armed = false;  // false if another thread has cancelled a mark meanwhile
  };

  // structures: for each argument the tokens of Flatten(). signature: of the leaves, in the order of the arguments; it
  // is `distinct`. donated: in that order, too. graph, names: as in DonateToNextRun() and MakeCallSite().
  Replay(py::list structures, Signature signature, std::vector<Donated> donated, std::string graph, py::object names)
      : structures_(std::move(structures)),
        signature_(std::move(signature)),
        donated_(std::move(donated)),
        graph_(std::move(graph)),
        names_(std::move(names)) {
    for (const py::handle structure : structures_) {
      count_ += LeavesOf(structure);
    }
  }

  // A Begun. None, with nothing marked, unless the arguments are like those of the earlier call and nothing else may
  // hold a donated buffer. Throws for a leaf that has been donated before, and the error of an earlier failed step.
  py::object Begin(const py::list& arguments, const std::string& where, int strict) const;

 private:
  // Whether the leaves have the facts and values of those of the earlier call. Appends the donated ones, and tensors
  // that may be views.
  bool AreAlike(const py::list& leaves, std::vector<ArgumentToMark>& donated, std::vector<at::Tensor>& viewed) const;

  py::list structures_;
  std::size_t count_ = 0;  // of the leaves
  Signature signature_;
  std::vector<Donated> donated_;
  std::string graph_;
  py::object names_;
};

}  // namespace torch_xla_donate
