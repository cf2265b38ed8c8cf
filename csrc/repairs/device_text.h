// The text of a device, such as "CPU:0", without formatting it again.
//
// torch_xla 2.8 and 2.9 ask for it for each output of a run and of a step (BackendDevice::toString), and torch formats
// it in a string stream: 3,000 instructions, a tenth of what torch_xla takes for an output.
//
// Threads: any. Errors: those of `format`.
#pragma once

#include <string>

#include "host/symbols.h"

namespace torch_xla_donate {

// The same text as `format` gives. Each thread remembers that of its last device.
std::string DeviceText(const lazy::BackendDevice& device, std::string (*format)(const lazy::BackendDevice*));

}  // namespace torch_xla_donate
