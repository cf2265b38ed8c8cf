"""Each donor goes to the output computed from it, in every way of donating, and the report says where it went."""

from __future__ import annotations

import pytest
import torch
import torch_xla
from helpers import BACKENDS, consume, pointer

from torch_xla_donate import DonationWarning, auto_donate, compile, donate_buffer, donation_report, is_donated, scan


def arrays(count: int, *shape: int) -> list[torch.Tensor]:
    tensors = [torch.full(shape, float(i + 1)).to("xla") for i in range(count)]
    torch_xla.sync(wait=True)
    return tensors


def adam_state() -> dict[str, list[torch.Tensor]]:
    p = arrays(3, 8, 8) + arrays(3, 8)
    state = {"v": [torch.zeros_like(x) for x in p], "p": p, "m": [torch.zeros_like(x) for x in p]}
    torch_xla.sync(wait=True)
    return state


def adam(state, grads):
    m = [0.9 * a + 0.1 * g for a, g in zip(state["m"], grads)]
    v = [0.99 * a + 0.01 * g * g for a, g in zip(state["v"], grads)]
    p = [a - 0.01 * b / (c.sqrt() + 1e-8) for a, b, c in zip(state["p"], m, v)]
    return {"p": p, "m": m, "v": v}


def by_marks(state, grads):
    new = adam(state, grads)
    donate_buffer(state)
    torch_xla.sync()
    return new


def by_liveness(state, grads):
    new = adam(state, grads)
    state.clear()
    with auto_donate():
        torch_xla.sync()
    return new


WAYS = {
    "marks": by_marks,
    "auto": by_liveness,
    **{name: compile(adam, donate_argnums=0, **options) for name, options in BACKENDS.items()},
}


@pytest.mark.parametrize("way", WAYS)
def test_functional_adam_keeps_every_pointer_in_every_way(way):
    state = adam_state()
    grads = [torch.ones_like(x) for x in state["p"]]
    torch_xla.sync(wait=True)
    for _ in range(4):
        before = {(key, i): pointer(x) for key in state for i, x in enumerate(state[key])}
        state = WAYS[way](state, grads)
        assert {(key, i): pointer(x) for key in state for i, x in enumerate(state[key])} == before
    report = donation_report(steps=3)
    assert report.crossed == 0
    assert [donor.crossed for donor in report.donors] == [False] * len(report.donors) == [False] * 54


def test_outputs_without_a_donor_do_not_take_the_first_places():
    """Two fresh outputs of the same bytes, one of another shape, come before the update."""
    (w,) = arrays(1, 4, 6)
    kept = []
    for _ in range(3):
        place = pointer(w)
        kept = [w.sum() + torch.zeros(24, device="xla"), w.t() * 2]
        new = w + 1
        donate_buffer(w)
        torch_xla.sync()
        w = new
        assert pointer(w) == place
        assert donation_report(steps=1).donors[0].crossed is False
    assert w.unique().tolist() == [4.0]
    assert kept[0].tolist() == [72.0] * 24
    assert torch.equal(kept[1].cpu(), torch.full((6, 4), 6.0))


def test_moved_outputs_keep_shape_dtype_and_value():
    """Outputs that change places have other shapes and element types of the same bytes."""
    a, b = arrays(2, 2, 6)
    ints, flat, halves = (a * 3).int(), (b * 5).reshape(-1), torch.cat([a, b]).to(torch.bfloat16)
    new = [a + 1, b + 1]
    donate_buffer([a, b])
    torch_xla.sync()
    assert [(x.dtype, tuple(x.shape)) for x in (ints, flat, halves)] == [
        (torch.int32, (2, 6)),
        (torch.float32, (12,)),
        (torch.bfloat16, (4, 6)),
    ]
    assert ints.unique().tolist() == [3]
    assert flat.unique().tolist() == [10.0]
    assert halves.float().unique().tolist() == [1.0, 2.0]
    assert [x.unique().tolist() for x in new] == [[2.0], [3.0]]
    assert not any(donor.crossed for donor in donation_report(steps=1).donors)


@pytest.mark.parametrize("auto", [False, True])
def test_adamw_in_place_beside_kept_gradients(auto):
    """torch_xla donates updates in place; with auto_donate no pair crosses, although the gradients are outputs."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]).to("xla")
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.ones(4, 16).to("xla")
    losses, moved = [], 0
    with auto_donate(auto):
        for step in range(5):
            optimizer.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            tensors = list(net.parameters())
            for state in optimizer.state.values():
                tensors += [state["exp_avg"], state["exp_avg_sq"]]
            before = [pointer(t) for t in tensors] if step > 1 else []
            optimizer.step()
            torch_xla.sync(wait=True)
            moved += sum(pointer(t) != place for t, place in zip(tensors, before))
            losses.append(loss.item())
    assert (moved == 0) == auto
    assert losses == sorted(losses, reverse=True)


def test_the_donor_that_an_output_is_computed_from_is_used_first():
    """More donors than outputs: the ones that outputs are computed from are used, the others stay readable."""
    a, b, c, d = arrays(4, 4)
    places = {"a": pointer(a), "c": pointer(c)}
    new_a, new_c = a + b.sum() + d.sum(), c * 2
    with pytest.warns(DonationWarning, match=r"not usable: f32\[4\], f32\[4\] ") as found:
        donate_buffer([b, c, d, a])
        torch_xla.sync(wait=True)
    assert "more donors than outputs of its size: 4 donors and 2 outputs of 16 bytes" in str(found[0].message)
    assert {"a": pointer(new_a), "c": pointer(new_c)} == places
    assert [is_donated(t) for t in (a, b, c, d)] == [True, False, True, False]
    assert (b.tolist(), d.tolist(), new_a.tolist()) == ([2.0] * 4, [4.0] * 4, [25.0] * 4)


def test_a_step_that_does_not_compile_releases_moved_outputs():
    (w,) = arrays(1, 4)
    fresh = torch.zeros(4, device="xla") + w.sum()
    new = w + 1
    donate_buffer(w)
    torch_xla._XLAC._set_allow_execution(False)
    try:
        with pytest.raises(RuntimeError):
            torch_xla.sync(wait=True)
    finally:
        torch_xla._XLAC._set_allow_execution(True)
    del fresh, new
    assert w.tolist() == [1.0] * 4
    assert consume(w, lambda w: w * 2).tolist() == [2.0] * 4


# ---- The report ----


def test_steps_without_donors_are_in_the_report():
    """A loop that loses its donation is seen by the guard that the docs recommend."""
    (w,) = arrays(1, 4)
    for _ in range(2):
        w = consume(w)
    report = donation_report(steps=2)
    assert report
    assert report.reused_fraction == 1.0
    for lost in range(1, 4):
        w = w + 1
        torch_xla.sync()
        report = donation_report(steps=2 + lost)
        assert [step.number is None for step in report.steps] == [False, False] + [True] * lost
        assert report.reused_fraction == pytest.approx(2 / (2 + lost))
        assert not report
        assert donation_report(steps=1).reused_fraction == 0.0
        assert f"{lost} of the last {2 + lost} steps had no donors." in str(report)
    w = w + 1
    print(w)  # a read is not a step
    assert len(donation_report().steps) <= 8
    for _ in range(8):
        w = w + 1
        torch_xla.sync()
    assert donation_report().reused_fraction == 0.0
    assert donation_report().donors == ()


def test_the_report_shows_outputs_of_donors_and_copied_bytes():
    x, y = arrays(2, 4, 4)
    new_x, new_y = x * 2, y @ x
    donate_buffer([x, y], into=[new_y, new_x])
    torch_xla.sync()
    report = donation_report(steps=1)
    assert {donor.name: donor.output for donor in report.donors} == {"[0]": 1, "[1]": 0}
    assert report.crossed == 0  # as asked for
    assert report.copied_bytes == report.steps[0].copied_bytes > 0
    assert "of donated buffers in these steps" in str(report)
    data = report.to_dict()
    assert data["copied_bytes"] == report.copied_bytes
    assert data["steps"][0]["donors"] == 2
    assert new_x.unique().tolist() == [2.0]
    assert new_y.unique().tolist() == [8.0]


def test_the_copy_of_an_array_that_is_not_donated_does_not_count():
    carry, x = arrays(2, 4, 4)
    (rows,) = arrays(1, 3, 4, 4)
    donate_buffer(x)
    new_carry, _ = scan(lambda c, row: (c + row, c), carry, rows)  # XLA copies `carry` into its loop
    out = x * 2
    torch_xla.sync()
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "donated" and donation_report(steps=1).copied_bytes == 0
    assert new_carry.unique().tolist() == [4.0] and out.unique().tolist() == [4.0]
