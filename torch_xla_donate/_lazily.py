"""Names of a package that are loaded at their first use, because training needs none of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def names_of(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's ``__getattr__`` and ``__dir__``, for the names of each module."""
    loaded = vars(sys.modules[package])
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded[name] = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        return loaded[name]

    return load, lambda: sorted({*loaded, *module_of})
