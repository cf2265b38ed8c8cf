// Pairs would-be donors with outputs by their bytes.
#include "features/would_be.h"

#include <map>
#include <utility>

#include "host/array_text.h"

namespace torch_xla_donate {

void WouldBe::Add(const lazy::BackendData& parameter, DonorPtr donor) {
  parameters_.push_back({BytesPerDevice(abi::DescribeBuffer(parameter)), std::move(donor)});
}

std::vector<DonorPtr> WouldBe::Used(const std::vector<lazy::BackendDataPtr>& outputs) const {
  std::map<std::int64_t, std::size_t> free;
  for (const lazy::BackendDataPtr& output : outputs) {
    const std::string text = output != nullptr ? abi::DescribeBuffer(*output) : std::string();
    if (IsDynamic(text)) {
      return {};  // of a size that only the device knows: XLA aliases nothing then
    }
    const auto bytes = BytesPerDevice(text);
    if (bytes) {
      ++free[*bytes];
    }
  }
  std::vector<DonorPtr> used;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.bytes || free[*parameter.bytes] == 0) {
      continue;
    }
    --free[*parameter.bytes];
    if (parameter.donor != nullptr) {
      used.push_back(parameter.donor);
    }
  }
  return used;
}

}  // namespace torch_xla_donate
