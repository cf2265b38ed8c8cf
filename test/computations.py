"""Computations for the tests of user_computation and call_jax."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch_xla.core.xla_builder as xb

jax = pytest.importorskip("jax", reason="the extra dev installs it on Python 3.11 and newer")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("the extra dev installs torchax on Python 3.11 and newer", allow_module_level=True)
# Not imported while tests are collected: it takes the place of torch's device module, which others need as it is.


def lowered(f: Any, *shapes: tuple[int, ...], **options: Any) -> Any:
    """The computation of a function that JAX has jitted with these options and lowered for arrays of float32."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    module = jax.jit(f, **options).lower(*arrays).compiler_ir("hlo")
    return xb.computation_from_module_proto("lowered", module.as_serialized_hlo_module_proto())


def from_stablehlo(body: str, arguments: str, results: str, **options: Any) -> Any:
    """The computation of a StableHLO function, of which the arguments may have attributes."""
    from jaxlib import _jax

    text = f"module @m {{ func.func public @main({arguments}) -> ({results}) {{ {body} }} }}"
    module = _jax.mlir.mlir_module_to_xla_computation(
        text, **{"return_tuple": True, "use_tuple_args": False, **options}
    )
    return xb.computation_from_module_proto("stablehlo", module.as_serialized_hlo_module_proto())


def from_text(text: str) -> Any:
    from jaxlib import _jax

    return xb.computation_from_module_proto("text", _jax.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def sgd(weight: Any, gradient: Any) -> Any:
    return weight - 0.5 * gradient


#: A module that torch_xla can call, and that donates its parameter.
TEXT = """HloModule m, buffer_donor={ (0, {}) }, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

ENTRY main.1 {
  a.2 = f32[4]{0} parameter(0)
  ROOT b.3 = f32[4]{0} add(a.2, a.2)
}
"""
