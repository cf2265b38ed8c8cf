// Arrays as XLA writes them, "f32[8,4]{1,0} sharding={devices=[4,1]0,1,2,3}": names of element types, and sizes.
//
// Threads: functions of their arguments. Errors: what is not understood gives nothing.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_xla_donate {

// XLA's name of an element type: "f32". For a type that XLA does not have, torch's name.
const char* ElementName(at::ScalarType dtype);

// The element type of an array that is written as above.
std::optional<at::ScalarType> ElementType(const std::string& array);

// The text up to the layout: "f32[8,4]".
std::string WithoutLayout(const std::string& array);

// The sizes of the whole array; none for a scalar and where they are not understood.
std::vector<std::int64_t> SizesOf(const std::string& array);

// Whether the device alone knows its size: "f32[<=8]". XLA aliases nothing in a graph with such an output.
bool IsDynamic(const std::string& array);

// Bytes of the largest shard, which is what XLA compares when it pairs donors with outputs.
std::optional<std::int64_t> BytesPerDevice(const std::string& array);

// Whether a sharding is part of the text.
bool IsSharded(const std::string& array);

// Whether the sharding, if there is one, cuts the array into pieces of one size. Where it does not, they are padded.
bool IsEven(const std::string& array);

}  // namespace torch_xla_donate
