"""The persistent compilation cache: donating and plain runs of a graph are two entries, each with its own aliasing."""

from __future__ import annotations

import json

import pytest
from helpers import run_script

pytestmark = pytest.mark.slow

# Runs the same function, donating (d) or not (p), in the order given; tells what became of each run.
SCRIPT = """
    import json, os, sys
    import torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics
    import torch_xla.runtime as xr
    import torch_xla_donate
    from torch_xla_donate import donate_buffer, is_donated

    folder, kind, order, readonly = sys.argv[1:]
    xr.initialize_cache(folder, readonly=readonly == "readonly")

    def place(t):
        xm.wait_device_ops()
        return torch_xla._XLAC._unsafe_buffer_pointer(t)

    def f(x):
        return x * 2 + 1

    def run(donate):
        t = torch.arange(8.0).to("xla")
        torch_xla.sync(wait=True)
        first, files = place(t), set(os.listdir(folder))
        if kind == "step":
            if donate:
                donate_buffer(t)
            out = f(t)
            torch_xla.sync(wait=True)
        else:
            options = {"pure": {"pure": True}, "openxla": {"backend": "openxla"}}[kind]
            out = torch_xla_donate.compile(f, donate_argnums=0 if donate else None, **options)(t)
        assert out.tolist() == [2 * i + 1 for i in range(8)]
        assert is_donated(t) == donate == (place(out) == first)
        if not donate:
            assert t.tolist() == list(range(8))
        return sorted(set(os.listdir(folder)) - files)

    new = [[step, run(step == "d")] for step in order]
    counters = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("Persistent")}
    print(json.dumps({"new": new, "counters": counters, "compiled": metrics.counter_value("UncachedCompile")}))
"""


def run(folder, kind, order, readonly=""):
    return json.loads(run_script(SCRIPT, str(folder), kind, order, readonly).stdout.splitlines()[-1])


def entries(folder):
    """The aliases of each entry, as XLA reads them back. jaxlib does here what torch_xla's client for CPU cannot."""
    names = run_script(
        """
        import json, os, sys
        import jax
        from jax._src.lib import xla_client

        device = jax.devices("cpu")
        devices = xla_client.DeviceList(tuple(device))
        found = {}
        for name in os.listdir(sys.argv[1]):
            with open(os.path.join(sys.argv[1], name), "rb") as file:
                executable = device[0].client.deserialize_executable(file.read(), devices, None)
            (module,) = executable.hlo_modules()
            found[name] = module.to_string().splitlines()[0]
        print(json.dumps(found))
        """,
        str(folder),
        env={"JAX_PLATFORMS": "cpu"},
    ).stdout
    return {name: "input_output_alias" in header for name, header in json.loads(names).items()}


@pytest.mark.parametrize("kind", ["step", "pure", "openxla"])
def test_a_donating_and_a_plain_run_never_share_an_entry(tmp_path, kind):
    # WHEN one process donates first, and another one last, each with a cache of its own
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
    first = run(tmp_path / "first", kind, "dp")
    last = run(tmp_path / "last", kind, "pd")
    # THEN each run has made an entry, the same ones in both orders
    (_, (donating,)), (_, (plain,)) = first["new"]
    assert last["new"] == [["p", [plain]], ["d", [donating]]]
    assert donating != plain
    # AND the donating one alone has an alias in its executable
    if kind == "step":
        assert entries(tmp_path / "first") == entries(tmp_path / "last") == {donating: True, plain: False}


@pytest.mark.parametrize(("before", "after"), [("dp", "pd"), ("d", "p"), ("p", "d"), ("dp", "dp")])
def test_a_process_that_finds_the_cache_donates_what_it_offers_and_nothing_else(tmp_path, before, after):
    run(tmp_path, "step", before)
    # The script compares values, pointers and is_donated at each run.
    found = run(tmp_path, "step", after)
    # THEN it has come upon the entries. torch_xla's CPU client cannot read any ("Deserializing serialized executable
    # not supported"), counts that, and compiles anew: a change here means that it can, and they are really used.
    seen = len(set(before) & set(after))
    assert found["counters"].get("PersistentCacheDeserializeFailure", 0) == seen
    assert found["counters"].get("PersistentCacheMiss", 0) == len(after) - seen
    assert "PersistentCacheHit" not in found["counters"]
    assert found["compiled"] == len(after)


def test_a_cache_that_must_not_be_written_is_left_as_it_is(tmp_path):
    run(tmp_path, "step", "d")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = run(tmp_path, "step", "pd", "readonly")
    assert found["new"] == [["p", []], ["d", []]]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
