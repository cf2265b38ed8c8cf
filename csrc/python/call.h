// The marks of one call, as Python holds them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "registry/registry.h"

namespace torch_xla_donate {

// A call's marks, for taking them back. What is still pending of them goes with it, as where an interrupt has hit its
// caller.
struct Call {
  std::shared_ptr<CallSite> site;
  std::vector<std::uint32_t> constants;  // positions of leaves in buffers that torch_xla shares between tensors
  std::vector<std::weak_ptr<lazy::BackendData>> buffers;  // of the leaves, whoever marked them first
  bool is_scope = false;                                  // the marks end with this object, at the latest

  explicit Call(std::shared_ptr<CallSite> of) : site(std::move(of)) {}
  Call(Call&&) = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (site != nullptr && is_scope) {
      DonationRegistry::Get().CancelCall(site.get());
    }
  }
};

}  // namespace torch_xla_donate
