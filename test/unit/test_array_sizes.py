"""The size of an array on a device, by which XLA pairs donors with outputs: bytes on CPU, padded to tiles on TPU."""

from __future__ import annotations

import pytest

from torch_xla_donate import _C, _host, hlo
from torch_xla_donate._report import explain
from torch_xla_donate.hlo.parser import parse_shape

# Measured with libtpu 0.0.21: (array, bytes on v4 to v6e, bytes on v2 and v3).
SIZES = [
    ("f32[]", 512, 1024),
    ("f32[100]", 512, 1024),
    ("f32[129]", 1024, 1024),
    ("f32[1025]", 8192, 8192),
    ("bf16[100]", 512, 1024),
    ("s8[1]", 512, 1024),
    ("f32[3,5]", 2048, 2048),
    ("f32[5,3]", 2048, 2048),
    ("f32[1,5]", 512, 1024),
    ("f32[1000,15]", 65536, 65536),
    ("f32[1000,3,5]", 81920, 81920),
    ("bf16[1024,1024]", 2097152, 2097152),
    ("f32[512,1024]", 2097152, 2097152),
    ("s64[64]", 1024, 2048),
    ("f32[0,7]", 0, 0),
    ("f32[64,32] sharding={devices=[4,1]0,1,2,3}", 8192, 8192),
]


@pytest.mark.parametrize(("array", "since_v4", "before_v4"), SIZES, ids=[size[0] for size in SIZES])
def test_arrays_are_padded_to_the_tiles_of_a_tpu(array, since_v4, before_v4):
    """On this machine the bytes count."""
    for platform, size in (("tpu", since_v4), ("tpu before v4", before_v4)):
        with _host.size_rule(platform):
            assert _C.size_on_device(array) == size, platform
    assert _C.size_on_device(array) == _C.bytes_per_device(array)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[3,5]{1,0:T(4,128)}", 2048),
        ("f32[64,32]{0,1:T(8,128)}", 16384),
        ("bf16[1000]{0:T(1024)(128)(2,1)}", 2048),
        ("f32[]{:T(128)}", 512),
        ("f32[8,256]{1,0:T(8,128)S(1)}", 8192),
        ("s4[8,100]{1,0:T(8,128)(8,1)E(4)}", 512),
        ("f32[2,3,5]{2,1,0:T(4,128)}", 4096),
        ("f32[3,5]{1,0}", 60),
        ("(f32[3,5]{1,0:T(4,128)}, f32[]{:T(128)})", 2560),
    ],
)
def test_the_layout_of_a_compiled_module_gives_the_padded_bytes(text, size):
    assert parse_shape(text).padded_bytes == size


def test_a_reason_gives_the_padded_size():
    with _host.size_rule("tpu"):
        for array, size in (("f32[15]", 60), ("f32[100]", 400)):
            raw = {"array": array, "bytes": size, "bytes_per_device": size, "size": _C.size_on_device(array)}
            _, reason = explain.StepSizes(["f32[3,5]"], [raw["size"]]).explain(raw)
            assert f"no output of the step has its size of 512 bytes, padded from {size} to TPU tiles" in reason
        _, crowded = explain.StepSizes(["f32[128]"], [raw["size"]] * 2).explain(raw)
        assert "2 donors and 1 output of 512 bytes, padded from 400 to TPU tiles" in crowded


def test_the_outcomes_of_a_module_come_from_its_texts():
    before = hlo.parse(
        "HloModule step, buffer_donor={ (0, {}), (1, {}), (2, {}) }, entry_computation_layout="
        "{(f32[8,4]{1,0}, f32[4]{0}, f32[8]{0})->(f32[8,4]{1,0}, f32[4]{0})}\n"
    )
    after = hlo.parse(
        "HloModule step, input_output_alias={ {1}: (1, {}, may-alias) }, buffer_donor={ (0, {}), (2, {}) }, "
        "entry_computation_layout={(f32[2,4]{1,0}, f32[4]{0}, f32[4]{0})->(f32[8,4]{1,0}, f32[4]{0})}\n"
    )
    first, second, third = hlo.donor_outcomes(before, after)
    assert first.reason == (
        "no output of the step has its size of 32 bytes (outputs: 1 of 16 bytes, 1 of 128 bytes). Output 0 has the "
        "whole array's shape, but is sharded differently (f32[8,4], 128 bytes)"
    )
    assert second.output == (1,) and str(second) == "parameter (1, {}) f32[4]: output 1"
    assert third.reason == "more donors than outputs of its size: 2 donors and 1 output of 16 bytes"
