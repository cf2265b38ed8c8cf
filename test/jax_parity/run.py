"""Runs the cases of one side: `jax`, `ours` or `ours-spmd`."""

from __future__ import annotations

import json
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
            side.package._report.notices._warned_sites.clear()
        found = dict(case.run(side))
        side.settle()
    told = [w for w in caught if str(w.message).startswith(UNUSABLE)]
    if told:
        assert all(issubclass(w.category, UserWarning) for w in told)
        found["warnings"] = len(told)
    return found


def observe_all(name: str) -> dict[int, Any]:
    """The observations of all cases of a side, by their number, as JSON has them: with lists for tuples."""
    spmd = name == "ours-spmd"
    side = Jax() if name == "jax" else Ours(spmd=spmd)
    return {
        number: json.loads(json.dumps(observe(side, case)))
        for number, case in enumerate(CASES)
        if case.run is not None and (name == "jax" or case.spmd == spmd)
    }
