// The members of Donor, which combine the wishes of its holders.
#include "registry/donor.h"

#include <algorithm>

#include "host/array_text.h"

namespace torch_xla_donate {

std::string Donor::Shape() const {
  std::string text = ElementName(dtype);
  text += '[';
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(sizes[i]);
  }
  return text + ']';
}

bool Donor::HeldBy(const abi::TensorData* tensor) const {
  return std::any_of(holders.begin(), holders.end(),
                     [tensor](const Holder& holder) { return holder.tensor.lock().get() == tensor; });
}

std::shared_ptr<abi::TensorData> Donor::Target() const {
  for (const Holder& holder : holders) {
    if (std::shared_ptr<abi::TensorData> target = holder.target.lock()) {
      return target;
    }
  }
  return nullptr;
}

bool Donor::IsForCompiledRun() const {
  return std::all_of(holders.begin(), holders.end(),
                     [](const Holder& holder) { return holder.site->for_compiled_run; });
}

Strictness Donor::Strict() const {
  if (holders.empty()) {
    return Strictness::kWarn;
  }
  const auto less = [](const Holder& left, const Holder& right) { return left.site->strict < right.site->strict; };
  return std::max_element(holders.begin(), holders.end(), less)->site->strict;
}

}  // namespace torch_xla_donate
