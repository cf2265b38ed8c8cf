"""The proof from the HLO: marks == donors before optimisation, aliases after it == pointers reused == the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import dump_env, run_script

from torch_xla_donate import hlo

PRELUDE = """
    import json
    import torch, torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla_donate import donate_buffer, donation_report, is_donated, _C

    def pointer(t):
        xm.wait_device_ops()
        return torch_xla._XLAC._unsafe_buffer_pointer(t)

    def make(*shape, dtype=torch.float32):
        t = torch.ones(*shape, dtype=dtype).to("xla")
        torch_xla.sync(wait=True)
        return t
"""


def run(tmp_path: Path, body: str, *flags: str, env: dict[str, str] | None = None):
    """Runs the body in a fresh process with dumping on; its printed JSON, and the module of its last step."""
    import textwrap

    source = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    done = run_script(source, env={**dump_env(tmp_path, *flags), **(env or {})})
    modules = [module for module in hlo.read_dump(tmp_path) if module.name.startswith("SyncTensorsGraph")]
    return json.loads(done.stdout.splitlines()[-1]), modules


MIXED = """
    used = [make(n) for n in (3, 5, 7)]
    unused = [make(11), make(13)]
    plain = [make(17)]
    before = {pointer(t) for t in used}
    donate_buffer({"used": used, "unused": unused})
    out = [t * 2 for t in used] + [sum(t.sum() for t in unused + plain)]
    torch_xla.sync(wait=True)
    report = donation_report()
    print(json.dumps({
        "reused": sorted(t.numel() for t in out[:3] if pointer(t) in before),
        "donated": sorted(donor.shape[0] for donor in report.donors if donor.outcome == "donated"),
        "unusable": sorted(donor.shape[0] for donor in report.donors if donor.outcome == "unusable"),
        "bytes": report.donated_bytes,
        "fraction": report.reused_fraction,
    }))
"""


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain parameters", "parameters in one tuple"])
def test_marks_are_the_donors_and_aliases_are_pointers_and_report(tmp_path, wrapped):
    env = {"XLA_PARAMETER_WRAPPING_THREADSHOLD": "2"} if wrapped else {}
    found, modules = run(tmp_path, MIXED, env=env)
    (module,) = modules

    asked = sorted(module.shape_of(donor).dims[0] for donor in module.donors)
    assert asked == [3, 5, 7, 11, 13]
    aliased = sorted(module.shape_of(alias).dims[0] for alias in module.aliases)
    left = sorted(module.shape_of(donor).dims[0] for donor in module.unused_donors)
    assert aliased == found["reused"] == found["donated"] == [3, 5, 7]
    assert left == found["unusable"] == [11, 13]
    assert module.aliased_bytes == found["bytes"] == 4 * 15
    assert found["fraction"] == pytest.approx(15 / 39)
    assert all((len(donor.parameter_index) == 1) is wrapped for donor in module.donors)


def test_without_a_mark_there_is_no_donor(tmp_path):
    _, modules = run(tmp_path, "t = make(3); u = t + 1; torch_xla.sync(wait=True); print(0)")
    (module,) = modules
    assert module.donors == ()
    assert module.aliases == ()


def test_a_mark_concerns_the_graph_that_reads_it_and_no_other(tmp_path):
    _, modules = run(
        tmp_path,
        """
        t, other = make(3), make(5)
        donate_buffer(t)
        a = other + 1
        torch_xla.sync(wait=True)
        b = t + 1
        str(b)
        c = t + 2
        torch_xla.sync(wait=True)
        print(0)
        """,
    )
    assert [len(module.donors) for module in modules] == [0, 0, 1]


def test_what_torch_xla_donates_by_itself_is_left_alone(tmp_path):
    found, modules = run(
        tmp_path,
        """
        ours, theirs = make(3), make(5)
        donate_buffer(ours)
        out = ours + 1
        theirs.add_(1)
        torch_xla.sync(wait=True)
        print(json.dumps([donor.shape[0] for donor in donation_report().donors]))
        """,
    )
    (module,) = modules
    assert sorted(module.shape_of(alias).dims[0] for alias in module.aliases) == [3, 5]
    assert found == [3]


def test_a_loop_has_one_module_and_all_of_its_steps_donate(tmp_path):
    found, modules = run(
        tmp_path,
        """
        t = make(1000)
        pointers = set()
        for step in range(10):
            donate_buffer(t)
            t = t * 0.5
            torch_xla.sync()
            pointers.add(pointer(t))
        print(json.dumps([len(pointers), len(donation_report().donors), bool(donation_report())]))
        """,
    )
    (module,) = modules
    assert len(module.aliases) == 1
    assert found == [1, 8, True]


def test_no_mark_means_the_same_hlo_as_without_the_package(tmp_path):
    body = """
        import sys
        import torch, torch_xla
        if sys.argv[1] == "with":
            import torch_xla_donate
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to("xla")
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(3, 4, device="xla")).sum().backward()
            optimizer.step()
            torch_xla.sync(wait=True)
    """
    texts = []
    for which in ("with", "without"):
        folder = tmp_path / which
        run_script(body, which, env=dump_env(folder))
        texts.append({path.name: path.read_bytes() for path in sorted(folder.glob("*optimizations.txt"))})
    assert len(texts[0]) >= 4
    assert texts[0] == texts[1]


def test_sharded_and_replicated_tensors_are_donated_under_spmd(tmp_path):
    found, modules = run(
        tmp_path,
        """
        import numpy as np
        import torch_xla.distributed.spmd as xs, torch_xla.runtime as xr
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (4,), ("x",))
        sharded = xs.mark_sharding(torch.ones(8, 4).to("xla"), mesh, ("x", None))
        replicated = torch.ones(8, 3).to("xla")
        torch_xla.sync(wait=True)
        donate_buffer({"s": sharded, "r": replicated})
        out = [sharded * 2, replicated * 2]
        torch_xla.sync(wait=True)
        report = donation_report()
        print(json.dumps([[donor.name for donor in report.donors], bool(report), is_donated(sharded)]))
        """,
        "--xla_force_host_platform_device_count=4",
        env={"CPU_NUM_DEVICES": "4"},
    )
    module = modules[-1]
    assert sorted(found[0]) == ["['r']", "['s']"]
    assert found[1:] == [True, True]
    assert len(module.donors) == len(module.aliases) == 2
    assert module.aliased_bytes == (2 * 4 + 8 * 3) * 4, "bytes are per device"
