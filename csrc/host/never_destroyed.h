// Values of the process that are never destroyed, because hooks and other threads may use them until it ends.
#pragma once

namespace torch_xla_donate {

// The one value of a class, made at the first use.
template <typename T>
T& NeverDestroyed() {
  static T* const value = new T();
  return *value;
}

}  // namespace torch_xla_donate
