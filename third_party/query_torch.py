"""Prints where the running interpreter's torch keeps its headers and libraries, for torch.cmake."""

import importlib.metadata
import importlib.util
import mmap
import re
import sys

try:
    import torch
    from torch.utils import cpp_extension

    torch_xla_version = importlib.metadata.version("torch_xla")
    extension = importlib.util.find_spec("_XLAC")
    if extension is None or extension.origin is None:
        raise ImportError("torch_xla has no module _XLAC")
except ImportError as error:
    sys.exit(f"{sys.executable} has no usable torch and torch_xla: {error}")

with open(extension.origin, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
    # pybind11 2, in torch_xla 2.8, shares its state among modules of one compiler's ABI version only.
    abi = re.search(rb"__pybind11_internals_v\d+_gcc_libstdcpp(_cxxabi\d+)__", text)
    pybind_abi = abi[1].decode() if abi is not None else ""

print(f"TORCH_VERSION={torch.__version__}")
print(f"TORCH_XLA_VERSION={torch_xla_version}")
print(f"TORCH_INCLUDE_DIRS={';'.join(cpp_extension.include_paths())}")
print(f"TORCH_LIB_DIR={cpp_extension.library_paths()[0]}")
print(f"TORCH_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
print(f"PYBIND_ABI={pybind_abi}")
