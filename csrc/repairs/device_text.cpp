// Remembers the text of the thread's last device.
#include "repairs/device_text.h"

#include <cstdint>

namespace torch_xla_donate {

std::string DeviceText(const lazy::BackendDevice& device, std::string (*format)(const lazy::BackendDevice*)) {
  struct Last {
    bool known = false;
    std::int8_t type = 0;
    std::int64_t ordinal = 0;
    std::string text;
  };
  thread_local Last last;
  // A process has one backend, which names a type always alike.
  if (!last.known || last.type != device.type() || last.ordinal != device.ordinal()) {
    last = {true, device.type(), device.ordinal(), format(&device)};
  }
  return last.text;
}

}  // namespace torch_xla_donate
