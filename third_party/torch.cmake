# Gets torch's and pybind11's headers from the target interpreter.
#
# With the CUDA wheel (which PyPI has for Linux) find_package(Torch) requires a complete CUDA toolkit, which this build
# does not need. pybind11 is the copy inside torch's headers. torch_xla's module was built with it, and C++ exceptions
# can only pass between modules with one pybind11 ABI.
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/query_torch.py"
  OUTPUT_VARIABLE host_torch_answer
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE host_torch_failed)
if(host_torch_failed)
  message(FATAL_ERROR "torch and torch_xla must be installed for ${Python_EXECUTABLE} before "
    "torch_xla_donate is built (see the message above). With pip: add --no-build-isolation.")
endif()
# One NAME=value a line. Semicolons separate the elements of a list, as in CMake.
foreach(name TORCH_VERSION TORCH_XLA_VERSION TORCH_INCLUDE_DIRS TORCH_LIB_DIR TORCH_CXX11_ABI PYBIND_ABI)
  if(NOT "${host_torch_answer}" MATCHES "${name}=([^\n]*)")
    message(FATAL_ERROR "third_party/query_torch.py did not print ${name}")
  endif()
  set(HOST_${name} "${CMAKE_MATCH_1}")
endforeach()

add_library(host_torch INTERFACE)
target_include_directories(host_torch SYSTEM INTERFACE ${HOST_TORCH_INCLUDE_DIRS})
target_compile_definitions(host_torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=${HOST_TORCH_CXX11_ABI}
  TORCH_API_INCLUDE_EXTENSION_H)
if(HOST_PYBIND_ABI)
  # Only with torch_xla's own name of the ABI do its functions know our exceptions.
  target_compile_definitions(host_torch INTERFACE "PYBIND11_BUILD_ABI=\"${HOST_PYBIND_ABI}\"")
endif()
foreach(library c10 torch_cpu torch_python)
  target_link_libraries(host_torch INTERFACE "${HOST_TORCH_LIB_DIR}/lib${library}.so")
endforeach()
message(STATUS "torch ${HOST_TORCH_VERSION}, torch_xla ${HOST_TORCH_XLA_VERSION}, "
  "C++11 ABI ${HOST_TORCH_CXX11_ABI}")
