// Compares the arguments of a call with those of an earlier one, and marks the donated ones.
#include "python/replay.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "features/compiled_run.h"
#include "host/graphs.h"
#include "host/views.h"
#include "python/bind.h"
#include "python/deferred_decref.h"

namespace torch_xla_donate {

bool Replay::AreAlike(const py::list& leaves, std::vector<ArgumentToMark>& donated,
                      std::vector<at::Tensor>& viewed) const {
  std::string_view expected(PyBytes_AS_STRING(signature_.key.ptr()),
                            static_cast<std::size_t>(PyBytes_GET_SIZE(signature_.key.ptr())));
  // Whether these facts come next.
  const auto match = [&expected](at::ArrayRef<std::int64_t> facts) {
    const std::string_view bytes(reinterpret_cast<const char*>(facts.data()), facts.size() * sizeof(std::int64_t));
    const bool is_next = expected.substr(0, bytes.size()) == bytes;
    expected.remove_prefix(is_next ? bytes.size() : 0);
    return is_next;
  };
  PyObject** items = PySequence_Fast_ITEMS(leaves.ptr());
  PyObject** other = PySequence_Fast_ITEMS(signature_.others.ptr());
  auto donor = donated_.begin();
  const std::size_t count = leaves.size();
  TensorReader reader(count);
  for (std::size_t i = 0; i < count; ++i) {
    PrefetchLeaves(items, i, count);
    if (!IsTensor(items[i])) {
      // A float is an input of the graph, so its value does not count.
      if (!match(kNoTensor) ||
          !(PyFloat_CheckExact(*other) ? PyFloat_CheckExact(items[i]) : IsSame(items[i], *other))) {
        return false;
      }
      ++other;
      continue;
    }
    reader.Read(items[i]);
    if (reader.dynamic || !match(reader.facts) ||
        (reader.kind != nullptr && reinterpret_cast<PyObject*>(reader.kind) != *other++)) {
      return false;
    }
    const bool has_aliases = abi::HasAliases(*reader.tensor);
    if (has_aliases) {
      viewed.push_back(*reader.tensor);
    }
    if (donor != donated_.end() && std::get<0>(*donor) == i) {
      donated.push_back({*reader.data, *reader.buffer, reader.sizes, static_cast<std::uint32_t>(i), has_aliases});
      ++donor;
    }
  }
  const abi::InfosLocked infos;
  return donor == donated_.end() && std::none_of(donated.begin(), donated.end(), [&infos](const ArgumentToMark& leaf) {
           const auto info = infos.Of(*leaf.buffer);
           return info.has_value() && info->read_only;
         });
}

py::object Replay::Begin(const py::list& arguments, const std::string& where, int strict) const {
  RunDeferredDecrefs();
  PythonCall<Begun> made;
  Begun& begun = made.call;
  py::list none;
  none.append(py::none());
  begun.leaves = none * py::int_(count_);
  py::ssize_t next = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!FlattenLike(arguments[i], structures_[i], begun.leaves, next)) {
      return py::none();
    }
  }
  std::vector<ArgumentToMark> donated;
  std::vector<at::Tensor> viewed;
  donated.reserve(donated_.size());
  if (!AreAlike(begun.leaves, donated, viewed)) {
    return py::none();
  }
  PyObject** items = PySequence_Fast_ITEMS(begun.leaves.ptr());
  const auto site = MakeCallSite(where, strict, names_, /*for_compiled_run=*/true);
  Call call = MarkForCall(donated, items, site);
  // As in mark_arguments: an argument that is a view of a donated one keeps its value.
  for (const at::Tensor& argument : viewed) {
    abi::KeepValue(argument);
  }
  for (ArgumentToMark& leaf : donated) {
    leaf.buffer.reset();  // the call's own pointers must not count as other holders
  }
  if (!PerhapsShared(*site).empty()) {
    return py::none();
  }
  std::vector<const lazy::BackendData*> buffers;
  std::vector<Steps::Offer> offers;
  buffers.reserve(donated.size());
  offers.reserve(donated.size());
  for (std::size_t i = 0; i < donated.size(); ++i) {
    buffers.push_back((*call.donors)[i].array.key);
    offers.push_back({nullptr, std::get<1>(donated_[i]), std::get<2>(donated_[i])});
  }
  begun.armed = DonateToNextRun(site.get(), buffers, std::move(offers), graph_, /*consumes=*/true);
  static_cast<Call&>(begun) = std::move(call);
  return std::move(made.object);
}

}  // namespace torch_xla_donate
