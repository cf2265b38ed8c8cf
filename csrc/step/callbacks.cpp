// Holds the callbacks.
#include "step/callbacks.h"

#include <utility>

namespace torch_xla_donate {

namespace {

HookCallbacks& Held() {
  static HookCallbacks* callbacks = new HookCallbacks();
  return *callbacks;
}

}  // namespace

void SetHookCallbacks(HookCallbacks callbacks) { Held() = std::move(callbacks); }

const HookCallbacks& Callbacks() { return Held(); }

}  // namespace torch_xla_donate
