// Reads vtables as the Itanium C++ ABI lays them out.
#include "host/object_check.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "host/layouts.h"

namespace torch_xla_donate::abi {

namespace {

constexpr std::size_t kLongestName = 200;

// A word of memory that has been found readable.
const void* WordAt(const void* address, std::ptrdiff_t index = 0) {
  const void* word;
  const auto offset = index * static_cast<std::ptrdiff_t>(sizeof(void*));
  std::memcpy(static_cast<void*>(&word), static_cast<const char*>(address) + offset, sizeof(void*));
  return word;
}

std::string Hex(const void* address) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", address);
  return address == nullptr ? "null" : text;
}

}  // namespace

void ObjectCheck::Readable(const std::string& what, const void* address, std::size_t bytes) const {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(void*) != 0 || !memory_.IsReadable(address, bytes)) {
    Mismatch(what + " is not where it was expected: " + Hex(address) + " is no object of " + std::to_string(bytes) +
             " bytes");
  }
}

void ObjectCheck::Object(const std::string& what, const void* address, std::size_t bytes,
                         std::initializer_list<std::string> types) const {
  Readable(what, address, bytes);
  // Before its first virtual function, a vtable has the offset of the object in the whole one, and the address of the
  // std::type_info. That has the address of the name after the address of its vtable.
  const auto require = [&](bool condition) {
    if (!condition) {
      Mismatch(what + " is not where it was expected: the object at " + Hex(address) + " is of no class of torch_xla");
    }
  };
  const char* const vtable = static_cast<const char*>(WordAt(address));
  const std::size_t before = 2 * sizeof(void*);
  require(module_.Contains(vtable) && memory_.IsReadable(vtable - before, before + sizeof(void*)));
  const void* const info = WordAt(vtable, -1);
  require(WordAt(vtable, -2) == nullptr && module_.Contains(info) && memory_.IsReadable(info, before));
  const char* const characters = static_cast<const char*>(WordAt(info, 1));
  require(module_.Contains(characters));
  std::string name;
  while (name.size() < kLongestName && memory_.IsReadable(characters + name.size(), 1) &&
         characters[name.size()] != '\0') {
    name += characters[name.size()];
  }
  if (std::find(types.begin(), types.end(), name) == types.end()) {
    std::string expected;
    for (const std::string& type : types) {
      expected += (expected.empty() ? "" : " or ") + type;
    }
    Mismatch(what + " is a " + name + ", expected " + expected);
  }
}

void ObjectCheck::Virtuals(const std::string& what, const void* address, std::size_t count) const {
  const void* const* const vtable = static_cast<const void* const*>(WordAt(address));
  std::size_t found = 0;
  while (found <= count && memory_.IsReadable(static_cast<const void*>(vtable + found), sizeof(void*)) &&
         module_.ContainsCode(vtable[found])) {
    ++found;
  }
  if (found != count) {
    Mismatch(what + " has " + (found > count ? "more than " : "") + std::to_string(found > count ? count : found) +
             " virtual functions, expected " + std::to_string(count));
  }
}

}  // namespace torch_xla_donate::abi
