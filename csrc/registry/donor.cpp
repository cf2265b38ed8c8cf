// The members of a donor, which combine the wishes of its marks.
#include "registry/donor.h"

#include <algorithm>
#include <stdexcept>

#include "host/array_text.h"

namespace torch_xla_donate {

at::ScalarType DonorArray::DtypeOf(const lazy::BackendData& buffer) {
  const std::int32_t number = abi::ElementTypeOf(buffer);
  if (const std::optional<at::ScalarType> dtype = ElementType(number)) {
    return *dtype;
  }
  throw std::invalid_argument("A tensor whose array has the element type " + std::to_string(number) +
                              " of XLA's PrimitiveType, for which torch has no dtype (21 is int4), cannot be donated. "
                              "Remove this leaf. Nothing was marked.");
}

std::string DonorArray::Shape() const {
  std::string text = ElementName(dtype);
  text += '[';
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(sizes[i]);
  }
  return text + ']';
}

const Mark* DonorStatus::MarkOf(const CallSite* site) const {
  const auto found =
      std::find_if(marks.begin(), marks.end(), [site](const Mark& mark) { return mark.site.get() == site; });
  return found == marks.end() ? nullptr : &*found;
}

std::shared_ptr<abi::TensorData> DonorStatus::PreferredOutput() const {
  for (auto mark = marks.rbegin(); mark != marks.rend(); ++mark) {
    if (std::shared_ptr<abi::TensorData> output = mark->preferred_output.lock()) {
      return output;
    }
  }
  return nullptr;
}

bool DonorStatus::IsForCompiledRun() const {
  return std::any_of(marks.begin(), marks.end(), [](const Mark& mark) { return mark.site->for_compiled_run; });
}

const CallSite* DonorStatus::StrictestSite() const {
  const auto less = [](const Mark& left, const Mark& right) { return left.site->strict < right.site->strict; };
  const auto found = std::max_element(marks.begin(), marks.end(), less);
  return found == marks.end() ? nullptr : found->site.get();
}

Strictness DonorStatus::Strict() const {
  const CallSite* site = StrictestSite();
  return site == nullptr ? Strictness::kWarn : site->strict;
}

void Donor::AddTensors(std::vector<std::shared_ptr<abi::TensorData>>& tensors) const {
  const lazy::BackendDataPtr held = buffer.lock();
  for (const Mark& mark : status.marks) {
    std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock();
    if (tensor != nullptr && held != nullptr && tensor->handle == held) {
      tensors.push_back(std::move(tensor));
    }
  }
}

void Donor::ForgetObjects() noexcept {
  buffer.reset();
  for (Mark& mark : status.marks) {
    mark.tensor.reset();
    mark.preferred_output.reset();
    mark.sharding.reset();
  }
}

}  // namespace torch_xla_donate
