// Arrays as XLA writes them, "f32[8,4]{1,0} sharding={devices=[4,1]0,1,2,3}": names of element types, and sizes.
//
// Threads: functions of their arguments. Errors: a text that cannot be parsed gives an empty result.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_xla_donate {

// XLA's name of an element type, such as "f32"; torch's name if XLA does not have the type.
const char* ElementName(at::ScalarType dtype);

std::optional<at::ScalarType> ElementType(const std::string& array);
// Of XLA's number of the type.
std::optional<at::ScalarType> ElementType(std::int32_t number);

// The text up to the layout: "f32[8,4]".
std::string WithoutLayout(const std::string& array);

// The sizes of the whole array; empty for a scalar and for a text that cannot be parsed.
std::vector<std::int64_t> SizesOf(const std::string& array);

// Whether only the device knows the size: "f32[<=8]". XLA aliases nothing in a graph with such an output.
bool IsDynamic(const std::string& array);

// How a platform sizes the arrays that XLA compares when it pairs donors with outputs.
enum class SizeRule {
  kBytes,          // CPU and GPU: the bytes of the elements
  kTiles,          // TPU: padded to tiles
  kTilesBeforeV4,  // TPU v2 and v3, whose tiles are larger
};

// The memory that the largest shard takes under a rule. XLA gives a donor to an output that takes as much.
//
// The TPU's rule was measured with libtpu 0.0.21: the compiler chooses the layout that pads least, by nothing
// but shape and dtype (docs/aot.md, test/nightly/test_tile_sizes.py).
std::optional<std::int64_t> MemoryPerDevice(const std::string& array, SizeRule rule);

bool IsSharded(const std::string& array);

// Whether all pieces of the sharding have one size. Otherwise XLA pads them.
bool IsEven(const std::string& array);

}  // namespace torch_xla_donate
