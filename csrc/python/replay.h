// A call of a traced function whose arguments are like those of an earlier call, as in each step of a training loop.
//
// One pass over the leaves compares them with those of the earlier call, and marks the donated ones; nothing is
// flattened into Python objects. A call that differs in anything takes the general way, which has the messages.
//
// The caller holds the GIL.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/address_numbers.h"
#include "python/call.h"

namespace torch_xla_donate {

namespace py = pybind11;

class Replay {
 public:
  // A donated leaf, the number of its parameter and that of the output computed from it.
  struct DonatedLeaf {
    std::size_t leaf;
    std::optional<std::size_t> parameter, preferred_output;
  };
  // A call that has marked its donated leaves and armed the run.
  struct Begun : Call {
    py::list leaves;
    bool armed = false;  // false if another thread has cancelled a mark meanwhile
  };

  // structures: for each argument the tokens of Flatten(). leaves: of a call, in the order of the arguments.
  // graph, names: as in DonateToNextRun() and MakeCallSite().
  Replay(const py::list& structures, const py::list& leaves, std::vector<DonatedLeaf> donated, std::string graph,
         py::object names);

  // Whether calls can be compared with this one: structures, leaves and shared buffers are of the usual kinds.
  bool IsPossible() const { return possible_; }

  // A Begun. None, with nothing marked, unless the arguments are like those of the earlier call and nothing else may
  // hold a donated buffer. Throws for a leaf that has been donated before, and the error of an earlier failed step.
  py::object Begin(const py::list& arguments, const std::string& where, int strict) const;

 private:
  struct Token {
    PyTypeObject* type;  // null for a leaf
    py::object keys;     // of a dict: a tuple
    py::ssize_t count;   // of a list or tuple
  };
  struct Leaf {
    enum class Kind : std::uint8_t { kTensor, kFloat, kValue } kind;
    py::object value;  // for kValue
    c10::SmallVector<std::int64_t, 4> sizes;
    at::ScalarType dtype = at::ScalarType::Undefined;
    std::int32_t element_type = 0;  // of the buffer, by XLA's number
    c10::DeviceIndex device = 0;
    bool requires_grad = false;
    bool is_donated = false;
  };

  bool ReadTokens(py::handle structure);
  bool Collect(PyObject* tree, std::size_t& token, const py::list& leaves, std::size_t& count) const;
  bool AreAlike(PyObject** leaves, std::vector<ArgumentToMark>& donated) const;
  bool IsAlike(const at::Tensor& tensor, std::size_t index, AddressNumbers& buffers,
               std::vector<ArgumentToMark>& donated) const;

  std::vector<Token> tokens_;
  std::vector<Leaf> leaves_;
  std::vector<DonatedLeaf> donated_;
  std::string graph_;
  py::object names_;
  bool possible_ = true;
};

}  // namespace torch_xla_donate
