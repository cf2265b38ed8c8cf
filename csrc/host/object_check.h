// Checks objects of torch_xla before the first use of their members and of their virtual functions.
//
// A torch_xla of another layout may have anything where a pointer is expected. So each pointer is judged by the
// mappings of the process. A vtable, the name of a class and a virtual function must lie in torch_xla's own module.
//
// Threads: belongs to one thread. Errors: all members throw std::runtime_error that names what was found.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <typeinfo>

#include "elf/memory.h"

namespace torch_xla_donate::abi {

class ObjectCheck {
 public:
  // `known` is a class of torch_xla's module.
  explicit ObjectCheck(const std::type_info& known) : module_(&known) {}

  // Throws unless these bytes can be read at an address that is a multiple of 8.
  void Readable(const std::string& what, const void* address, std::size_t bytes) const;
  // Throws unless an object of so many bytes is there, whose class is torch_xla's and has one of these names.
  void Object(const std::string& what, const void* address, std::size_t bytes,
              std::initializer_list<std::string> types) const;
  // Throws unless the class of an object that has passed Object() has exactly so many virtual functions.
  void Virtuals(const std::string& what, const void* address, std::size_t count) const;

 private:
  const MemoryMap memory_;
  const LoadedLibrary module_;
};

}  // namespace torch_xla_donate::abi
