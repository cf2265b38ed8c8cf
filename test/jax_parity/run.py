"""Runs the cases of one side and prints what each has shown, as JSON: `python run.py jax`, `ours` or `ours-spmd`."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from cases import CASES, Case
from sides import Jax, Ours, Side

UNUSABLE = "Some donated buffers were not usable"


def observe(side: Side, case: Case) -> dict[str, Any]:
    """The observations of a case, and the warnings it made."""
    assert case.run is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(side, Ours):
            side.package._report._warned_sites.clear()
        found = dict(case.run(side))
        side.settle()
    told = [w for w in caught if str(w.message).startswith(UNUSABLE)]
    if told:
        assert all(issubclass(w.category, UserWarning) for w in told)
        found["warnings"] = len(told)
    return found


def main(name: str) -> None:
    spmd = name == "ours-spmd"
    side = Jax() if name == "jax" else Ours(spmd=spmd)
    found: dict[int, Any] = {}
    for number, case in enumerate(CASES):
        if case.run is None or (name != "jax" and case.spmd != spmd):
            continue
        found[number] = observe(side, case)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
