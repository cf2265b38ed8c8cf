"""Prints where the running interpreter's torch keeps its headers and libraries, for torch.cmake."""

import importlib.metadata
import sys

try:
    import torch
    from torch.utils import cpp_extension

    torch_xla_version = importlib.metadata.version("torch_xla")
except ImportError as error:
    sys.exit(f"{sys.executable} has no usable torch and torch_xla: {error}")

print(f"TORCH_VERSION={torch.__version__}")
print(f"TORCH_XLA_VERSION={torch_xla_version}")
print(f"TORCH_INCLUDE_DIRS={';'.join(cpp_extension.include_paths())}")
print(f"TORCH_LIB_DIR={cpp_extension.library_paths()[0]}")
print(f"TORCH_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
