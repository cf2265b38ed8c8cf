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

const Holder* Donor::HolderOf(const CallSite* site) const {
  const auto found =
      std::find_if(holders.begin(), holders.end(), [site](const Holder& holder) { return holder.site.get() == site; });
  return found == holders.end() ? nullptr : &*found;
}

std::shared_ptr<abi::TensorData> Donor::Target() const {
  for (auto holder = holders.rbegin(); holder != holders.rend(); ++holder) {
    if (std::shared_ptr<abi::TensorData> target = holder->target.lock()) {
      return target;
    }
  }
  return nullptr;
}

bool Donor::IsForCompiledRun() const {
  return std::all_of(holders.begin(), holders.end(),
                     [](const Holder& holder) { return holder.site->for_compiled_run; });
}

const CallSite* Donor::StrictestSite() const {
  const auto less = [](const Holder& left, const Holder& right) { return left.site->strict < right.site->strict; };
  const auto found = std::max_element(holders.begin(), holders.end(), less);
  return found == holders.end() ? nullptr : found->site.get();
}

Strictness Donor::Strict() const {
  const CallSite* site = StrictestSite();
  return site == nullptr ? Strictness::kWarn : site->strict;
}

bool Donor::IsSmall() const {
  return std::all_of(holders.begin(), holders.end(),
                     [this](const Holder& holder) { return bytes < holder.site->min_bytes; });
}

}  // namespace torch_xla_donate
