"""Compiles modules with one donor and one output for a TPU: python compile_pairs.py TOPOLOGY < pairs.json.

Writes for each pair whether the TPU compiler gave the donor to the output, and the memory of both in bytes. It imports
the package's compiler as a file, so that this process needs no torch.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

COMPILER = Path(__file__).resolve().parents[2] / "torch_xla_donate" / "hlo" / "_tpu_compiler.py"


def module(donor: str, output: str) -> str:
    """HLO whose output has the donor's first element everywhere."""
    dtype, sizes = donor.rstrip("]").split("[")
    rank = len(sizes.split(",")) if sizes else 0
    first = f"{dtype}[{','.join('1' * rank)}]"
    return f"""HloModule pair, buffer_donor={{ (0, {{}}) }}, entry_computation_layout={{({donor})->{output}}}

ENTRY %main (p: {donor}) -> {output} {{
  %p = {donor} parameter(0)
  %first = {first} slice(%p), slice={{{", ".join(["[0:1]"] * rank)}}}
  %scalar = {dtype}[] reshape(%first)
  %converted = {output.split("[")[0]}[] convert(%scalar)
  ROOT %all = {output} broadcast(%converted), dimensions={{}}
}}
"""


def main(topology: str, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("tpu_compiler", COMPILER)
    assert spec is not None and spec.loader is not None
    compiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiler)
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        request = {"topology": topology, "partitions": 1, "donors": [0], "aliases": [], "order": []}
        request |= {"shardy": False, "undonated": False}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        for donor, output in pairs:
            (folder / "module.hlo").write_text(module(donor, output), encoding="utf-8")
            answer = compiler.main(folder)
            memory = answer.get("memory") or sys.exit(f"{donor} and {output}: {answer}")
            answers.append({"aliased": memory["alias"] > 0, "sizes": [memory["argument"], memory["output"]]})
    return answers


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.load(sys.stdin))))
