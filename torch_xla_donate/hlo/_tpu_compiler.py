"""Compiles a module for a TPU topology or for CPU: python _tpu_compiler.py FOLDER, in a process without torch_xla.

Reads `request.json` and `module.hlo` in the folder, and writes `answer.json` and `compiled.hlo`. A separate process,
because libtpu ends its process on some errors, and because it writes to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

# Without a TPU there is no metadata server to query. Several compilers, or a program on a TPU, may run at once.
os.environ.update({"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"})


def main(folder: Path) -> dict[str, Any]:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    if request["topology"] == "cpu":
        # Replaces the flags of the program, which may dump modules or belong to another version of XLA.
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={request['partitions']}"
    try:
        from jaxlib import _jax

        devices = devices_of(request["topology"])
    except ImportError as error:
        return {"kind": "missing", "error": str(error)}
    except Exception as error:  # of several classes
        return {"kind": "topology", "error": str(error)}
    if request["partitions"] > len(devices):
        return {"kind": "devices", "devices": len(devices)}
    text = (folder / "module.hlo").read_text(encoding="utf-8")
    try:
        module = _jax.hlo_module_from_text(text)
    except Exception as error:
        return {"kind": "text", "error": str(error)}
    try:
        compiled = compile_module(module, request, devices[: request["partitions"]])
    except Exception as error:
        return {"kind": "compile", "error": str(error), "devices": len(devices)}
    (folder / "compiled.hlo").write_text(compiled.hlo_modules()[0].to_string(), encoding="utf-8")
    answer = {"devices": len(devices), "memory": str(compiled.get_compiled_memory_stats())}
    if request["undonated"]:
        plain = {**request, "donors": [], "aliases": []}
        with contextlib.suppress(Exception):  # without donation a step may need more memory than there is
            compiled = compile_module(module, plain, devices[: request["partitions"]])
            answer["undonated"] = str(compiled.get_compiled_memory_stats())
    return answer


def devices_of(topology: str) -> list[Any]:
    """The devices of a TPU topology, or those that jax has on this machine's CPU."""
    if topology == "cpu":
        import jax

        return list(jax.devices("cpu"))
    import libtpu  # noqa: F401
    from jax.experimental import topologies

    chips = topology.partition(":")[2]
    # libtpu assumes hosts of four chips. A host with one chip has to be named.
    single = {"chips_per_host_bounds": (1, 1, 1)} if set(chips.split("x")) == {"1"} else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **single)
    return sorted(found.devices, key=lambda device: device.id)


def compile_module(module: Any, request: dict[str, Any], devices: list[Any]) -> Any:
    """An executable of these devices. That of a topology cannot be run."""
    import numpy as np
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    if len(devices) > 1:
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = request["shardy"]
        # As torch_xla compiles. Otherwise outputs without a sharding are replicated, and take no donor.
        build.allow_spmd_sharding_propagation_to_output = [True]
    client = devices[0].client
    # jax has no compiler for a CPU without its devices.
    compile_ = client.compile_and_load if devices[0].platform == "cpu" else client.compile
    return compile_(stablehlo_of(module, request), xla_client.DeviceList(tuple(devices)), options)


def stablehlo_of(module: Any, request: dict[str, Any]) -> bytes:
    """The module as StableHLO bytecode. The conversion loses the donors and the aliases, so they are added again."""
    from jax._src.interpreters import mlir
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    computation = xla_client.XlaComputation(module.as_serialized_hlo_module_proto())
    text = _jax.mlir.xla_computation_to_mlir_module(computation)
    with mlir.make_ir_context(), ir.Location.unknown():
        converted = ir.Module.parse(text)
        main: Any = ir.SymbolTable(converted.operation)["main"]
        attributes = [{item.name: item.attr for item in one} for one in main.arg_attrs]
        for number in request["donors"]:
            attributes[number]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        for number, output in request["aliases"]:
            attributes[number]["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), output)
        order = request["order"] or list(range(len(attributes)))
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(attributes[number]) for number in order])
        if request["order"]:
            reorder(main, order)
        bytecode = io.BytesIO()
        converted.operation.write_bytecode(bytecode)
    return bytecode.getvalue()


def reorder(main: Any, order: list[int]) -> None:
    """Puts parameter `order[i]` of a function at place i."""
    from jaxlib.mlir import ir

    block = main.entry_block
    before = list(block.arguments)
    types = [before[number].type for number in order]
    for number in order:
        before[number].replace_all_uses_with(block.add_argument(before[number].type, ir.Location.unknown()))
    for _ in before:
        block.erase_argument(0)
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, main.type.results))


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules would hide others of the same name
    FOLDER = Path(sys.argv[1])
    (FOLDER / "answer.json").write_text(json.dumps(main(FOLDER)), encoding="utf-8")
