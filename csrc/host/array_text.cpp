// Parses the texts of abi::DescribeBuffer.
#include "host/array_text.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace torch_xla_donate {

namespace {

struct Element {
  at::ScalarType dtype;
  const char* name;
  std::int32_t number;  // in xla_data.proto
};
// The frequent ones come first, because each mark looks its type up.
constexpr Element kElements[] = {
    {at::ScalarType::Float, "f32", 11},
    {at::ScalarType::BFloat16, "bf16", 16},
    {at::ScalarType::Bool, "pred", 1},
    {at::ScalarType::Byte, "u8", 6},
    {at::ScalarType::Char, "s8", 2},
    {at::ScalarType::Short, "s16", 3},
    {at::ScalarType::Int, "s32", 4},
    {at::ScalarType::Long, "s64", 5},
    {at::ScalarType::UInt16, "u16", 7},
    {at::ScalarType::UInt32, "u32", 8},
    {at::ScalarType::UInt64, "u64", 9},
    {at::ScalarType::Half, "f16", 10},
    {at::ScalarType::Double, "f64", 12},
    {at::ScalarType::ComplexFloat, "c64", 15},
    {at::ScalarType::ComplexDouble, "c128", 18},
    {at::ScalarType::Float8_e4m3fn, "f8e4m3fn", 20},
    {at::ScalarType::Float8_e5m2, "f8e5m2", 19},
};

// The element whose member has this value; null if there is none.
template <typename Member, typename Value>
const Element* FindElement(Member Element::* member, const Value& value) {
  for (const Element& element : kElements) {
    if (value == element.*member) {
      return &element;
    }
  }
  return nullptr;
}

std::optional<at::ScalarType> DtypeOf(const Element* element) {
  return element == nullptr ? std::nullopt : std::optional(element->dtype);
}

// Returns the numbers between `open` and the next ']', or nullopt if the text has no such list.
std::optional<std::vector<std::int64_t>> Numbers(const std::string& text, const std::string& open) {
  const std::size_t begin = text.find(open);
  const std::size_t end = text.find(']', begin);
  if (begin == std::string::npos || end == std::string::npos) {
    return std::nullopt;
  }
  std::vector<std::int64_t> numbers;
  std::istringstream list(text.substr(begin + open.size(), end - begin - open.size()));
  for (std::int64_t number = 0; list >> number; list.ignore(1)) {
    numbers.push_back(number);
  }
  return list.eof() ? std::optional(numbers) : std::nullopt;
}

// Returns for each dimension its size and the number of its pieces.
std::optional<std::vector<std::pair<std::int64_t, std::int64_t>>> Cuts(const std::string& array) {
  const std::size_t sharding = array.find(" sharding=");
  const auto sizes = Numbers(array.substr(0, sharding), "[");
  if (!sizes) {
    return std::nullopt;
  }
  // Tiles beyond the array's rank are copies.
  const auto tiles = sharding == std::string::npos ? std::nullopt : Numbers(array.substr(sharding), "devices=[");
  std::vector<std::pair<std::int64_t, std::int64_t>> cuts;
  for (std::size_t i = 0; i < sizes->size(); ++i) {
    cuts.emplace_back((*sizes)[i], tiles && i < tiles->size() ? std::max<std::int64_t>((*tiles)[i], 1) : 1);
  }
  return cuts;
}

std::int64_t RoundUp(std::int64_t size, std::int64_t unit) { return (size + unit - 1) / unit * unit; }

// The power of two at or above `size`, at least `least` and at most `most`.
std::int64_t TileSize(std::int64_t size, std::int64_t least, std::int64_t most) {
  std::int64_t tile = least;
  while (tile < size && tile < most) {
    tile *= 2;
  }
  return std::min(tile, most);
}

// Elements of an array of these sizes, padded to the tiles of the layout that pads least. `rows` elements of one column
// share a word of 32 bits.
std::int64_t PaddedElements(const std::vector<std::int64_t>& sizes, std::int64_t rows) {
  constexpr std::int64_t kLanes = 128, kSublanes = 8;
  if (sizes.size() < 2) {
    const std::int64_t size = sizes.empty() ? 1 : sizes[0];
    return RoundUp(size, TileSize(size, rows * kLanes, kSublanes * kLanes));
  }
  std::int64_t all = 1;
  for (const std::int64_t size : sizes) {
    all *= size;
  }
  std::int64_t least = 0;
  // Any two dimensions may be the most minor ones.
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    for (std::size_t j = 0; j < sizes.size(); ++j) {
      if (i != j) {
        const std::int64_t sublanes = RoundUp(sizes[i], TileSize(sizes[i], rows, kSublanes));
        const std::int64_t padded = all / sizes[i] / sizes[j] * sublanes * RoundUp(sizes[j], kLanes);
        least = least == 0 ? padded : std::min(least, padded);
      }
    }
  }
  return least;
}

}  // namespace

const char* ElementName(at::ScalarType dtype) {
  const Element* element = FindElement(&Element::dtype, dtype);
  return element == nullptr ? c10::toString(dtype) : element->name;
}

std::optional<at::ScalarType> ElementType(const std::string& array) {
  return DtypeOf(FindElement(&Element::name, array.substr(0, array.find('['))));
}

std::optional<at::ScalarType> ElementType(std::int32_t number) {
  return DtypeOf(FindElement(&Element::number, number));
}

std::string WithoutLayout(const std::string& array) { return array.substr(0, array.find(']') + 1); }

std::vector<std::int64_t> SizesOf(const std::string& array) {
  return Numbers(WithoutLayout(array), "[").value_or(std::vector<std::int64_t>());
}

bool IsDynamic(const std::string& array) { return array.find("<=") != std::string::npos; }

std::optional<std::int64_t> MemoryPerDevice(const std::string& array, SizeRule rule) {
  const std::optional<at::ScalarType> dtype = ElementType(array);
  const auto cuts = Cuts(array);
  if (!dtype || !cuts) {
    return std::nullopt;
  }
  const auto width = static_cast<std::int64_t>(c10::elementSize(*dtype));
  std::int64_t elements = 1;
  std::vector<std::int64_t> sizes;
  for (const auto& [size, pieces] : *cuts) {
    sizes.push_back((size + pieces - 1) / pieces);
    elements *= sizes.back();
  }
  if (rule == SizeRule::kBytes || elements == 0) {
    return elements * width;
  }
  // An element of 64 bits is two words in two arrays.
  const std::int64_t rows = 4 / std::min<std::int64_t>(width, 4) * (rule == SizeRule::kTilesBeforeV4 ? 2 : 1);
  return PaddedElements(sizes, rows) * width;
}

bool IsSharded(const std::string& array) { return array.find(" sharding=") != std::string::npos; }

bool IsEven(const std::string& array) {
  const auto cuts = Cuts(array);
  return !cuts || std::all_of(cuts->begin(), cuts->end(), [](const auto& cut) { return cut.first % cut.second == 0; });
}

}  // namespace torch_xla_donate
