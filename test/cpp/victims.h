// Loads the victims (one shared library per link mode) and reads their memory.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "elf/image.h"

constexpr const char* kAdd = "callee_add";
constexpr const char* kMultiply = "callee_multiply";
constexpr const char* kVirtualAdd = "_ZNK5Adder3AddEii";

inline std::string LibraryPath(const std::string& name) { return std::string(VICTIM_FOLDER) + "/lib" + name + ".so"; }

class Library {
 public:
  explicit Library(const std::string& name) : path(LibraryPath(name)), handle_(dlopen(path.c_str(), RTLD_LAZY)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }
  void* Symbol(const char* name) const {
    void* const found = dlsym(handle_, name);
    if (found == nullptr) throw std::runtime_error(path + " has no symbol " + name);
    return found;
  }
  int Call(const char* function, int a, int b) const {
    return reinterpret_cast<int (*)(int, int)>(Symbol(function))(a, b);
  }
  int Add(int a, int b) const { return Call("victim_add", a, b); }
  int Multiply(int a, int b) const { return Call("victim_multiply", a, b); }

  const std::string path;

 private:
  void* const handle_;  // never closed: patches may point into the library
};

inline std::string VictimName(const std::string& mode) { return "victim_" + mode; }

// The function that the dynamic linker must have bound. Not `&callee_add`, because the test program must not import it.
inline void* CalleeFunction(const char* name) {
  static const Library callee("callee");
  return callee.Symbol(name);
}

inline std::vector<torch_xla_donate::RelocationSlot> SlotsOf(const torch_xla_donate::ElfImage& image,
                                                             const std::string& symbol) {
  return image.SlotsOfEach({symbol}).at(symbol);
}

// The protection of every page of the file's mappings, equal neighbours joined: "begin-end rw-p\n...".
inline std::string ProtectionsOf(const std::string& path) {
  char real[PATH_MAX];
  if (realpath(path.c_str(), real) == nullptr) throw std::runtime_error("no such file: " + path);
  std::ifstream maps("/proc/self/maps");
  std::ostringstream text;
  std::uintptr_t begin = 0, end = 0;
  std::string flags;
  const auto flush = [&] {
    if (end != 0) text << std::hex << begin << "-" << end << " " << flags << "\n";
  };
  for (std::string line; std::getline(maps, line);) {
    if (line.size() < std::string(real).size() || line.find(real) == std::string::npos) continue;
    std::istringstream fields(line);
    std::uintptr_t from = 0, to = 0;
    char dash = 0;
    std::string now;
    fields >> std::hex >> from >> dash >> to >> now;
    if (from != end || now != flags) {
      flush();
      begin = from;
      flags = now;
    }
    end = to;
  }
  flush();
  return text.str();
}
