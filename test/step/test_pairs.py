"""Each donor goes to the output computed from it, in every way of donating, and the report says where it went."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_xla
from helpers import BACKENDS, compiles, consume, pointer, whole_copy

from torch_xla_donate import (
    _C,
    DonationError,
    DonationWarning,
    auto_donate,
    cancel_donation,
    compile,
    donate_buffer,
    donation_report,
    is_donated,
    scan,
)


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


# --- into: what is refused, and whether the pair was kept ---


def test_any_permutation_of_pairs_is_kept_with_right_values(make):
    """Two orders of one graph must not share an executable: each would run with the other's parameters."""
    for order in [*itertools.permutations(range(4)), (0, 1, 2, 3), (1, 0, 3, 2)]:
        sources = [make(5) + k for k in range(4)]
        torch_xla.sync()
        addresses = [pointer(source) for source in sources]
        outputs = [source * (k + 2) for k, source in enumerate(sources)]
        donate_buffer(sources, into=[outputs[k] for k in order])
        torch_xla.sync()
        assert [donor.into_kept for donor in donation_report(steps=1).donors] == [True] * 4, order
        assert [pointer(outputs[k]) for k in order] == addresses
        assert [out.tolist() for out in outputs] == [[(i + k) * (k + 2) for i in range(5)] for k in range(4)]


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_programs_that_share_buffers_share_no_executable():
    """The programs differ in nothing but which tensor of a shared buffer goes where; both are reordered."""

    def step(swap):
        x, y, z = (torch.full((4,), value).to("xla") for value in (1.0, 10.0, 100.0))
        torch_xla.sync(wait=True)
        b, c = whole_copy(x), whole_copy(y)
        p, q = (c, b) if swap else (b, c)
        first, second = p * 2 + q * 3 + x * 5 + y * 7, z + 1
        donate_buffer([x, y, z, b, c], into=[second, None, first, None, None])
        torch_xla.sync(wait=True)
        _C.take_notices()
        assert "donated" in [donor.outcome for donor in donation_report(steps=1).donors]
        return first.tolist()[0], second.tolist()[0]

    assert step(swap=False) == (2 + 30 + 5 + 70, 101)
    assert step(swap=True) == (20 + 3 + 5 + 70, 101)


def test_updates_in_place_keep_their_own_buffer_beside_into(make):
    a, b, own = make(6), make(6), make(6)
    addresses = pointer(a), pointer(b), pointer(own)
    x = a + 1
    own.mul_(2)
    y = b + 1
    donate_buffer([a, b], into=[y, x])
    torch_xla.sync()
    assert (pointer(y), pointer(x), pointer(own)) == addresses
    assert own.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_pair_is_kept_whatever_output_comes_first(make, earlier):
    """Of two outputs XLA takes the first, so the step puts the target there. Of two targets the later one counts."""
    a = make(6)
    place = pointer(a)
    first = a + 1
    second = a + 2
    if earlier:
        donate_buffer(a, into=first)
    donate_buffer(a, into=second)
    torch_xla.sync()
    assert pointer(second) == place
    report = donation_report(steps=1)
    assert (report.donors[0].into_kept, report.donors[0].crossed) == (True, False)
    assert (first.tolist()[0], second.tolist()[0]) == (1, 2)


def test_a_pair_that_could_not_be_kept_is_reported(make):
    """Two donors that ask for one output: the second gets another."""
    a, b = make(6), make(6)
    first, second = a + b, a - b
    donate_buffer([a], into=[second])
    donate_buffer([b], into=[second])
    torch_xla.sync()
    report = donation_report(steps=1)
    assert sorted(donor.into_kept for donor in report.donors) == [False, True]
    assert "into not kept" in str(report)
    assert (first.tolist()[1], second.tolist()[1]) == (2, 0)


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_a_refused_pair_makes_no_other_graph(make):
    """A crossed pair reorders the graph, which is compiled again; a refused one leaves the graph as it is."""

    def compiled(shared, into):
        a, b = make(23), make(23)
        _holders = [whole_copy(t) for t in (a, b) if shared]
        x, y = a + 1, b + 2
        if into:
            donate_buffer([a, b], into=[y, x])
        before = compiles()
        torch_xla.sync()
        after = compiles()
        assert (x - y).tolist() == [-1] * 23
        return after - before

    assert [compiled(True, False), compiled(True, True), compiled(False, True)] == [1, 0, 1]
    assert [donor.outcome for donor in donation_report(steps=1).donors] == ["donated", "donated"]


def test_a_pytree_may_have_gaps(make):
    a, b, c = make(3), make(4), make(5)
    new = {"a": a * 2, "c": c * 2}
    also = b * 2
    donate_buffer({"a": a, "b": b, "c": c}, into={"a": new["a"], "b": None, "c": new["c"]})
    torch_xla.sync()
    kept = {donor.name: donor.into_kept for donor in donation_report(steps=1).donors}
    assert kept == {"['a']": True, "['b']": None, "['c']": True}
    assert also.tolist() == [0, 2, 4, 6]


def test_dictionaries_are_paired_by_key_and_others_by_position(make):
    """Keys that print alike are told apart."""
    for keys in [("a", "b"), (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)), None]:
        a, b = make(6), make(6)
        addresses = pointer(a), pointer(b)
        first, second = a + 1, b + 1
        # In the order of the new dictionary, unless the keys agree.
        new = {keys[1]: second, keys[0]: first} if keys else {"x": first, "y": second}
        donate_buffer({keys[0]: a, keys[1]: b} if keys else [a, b], into=new)
        torch_xla.sync()
        assert [donor.into_kept for donor in donation_report(steps=1).donors] == [True, True]
        assert (pointer(first), pointer(second)) == addresses


def test_a_pair_is_known_after_its_target_has_gone(make):
    """The graph shows it, and nothing waits for the values."""
    a = make(9)
    out = a + 1
    donate_buffer(a, into=out)
    torch_xla.sync()
    del out
    assert donation_report(steps=1).donors[0].into_kept is True
    assert is_donated(a)


def test_a_target_that_does_not_fit_is_an_error_and_marks_nothing(make):
    t, ready = make(4), make(4)
    for source, target, error, text in [
        (t, t[:2] + 1, ValueError, r"into is float32\[2\], but the donated tensor is float32\[4\].*same shape and"),
        (t, (t + 1).int(), ValueError, r"into is int32\[4\], but the donated tensor is float32\[4\]"),
        (t, torch.ones(4), ValueError, "into is on cpu, but the donated tensor is on xla:0"),
        (t, [t + 1, t + 2], ValueError, "into has 2 leaves, but tensors has 1"),
        ([t, ready], [None, "x"], TypeError, r"into\[1\] is of type str, not a tensor"),
        ({"a": t, "b": ready}, {"a": t, "c": t}, ValueError, r"into\['c'\] has no counterpart .* are \['a'\], \['b'\]"),
        (t, ready, DonationError, "into is materialised already, so the next step has no output for it"),
        (t + 1, t + 2, DonationError, "has no buffer yet"),
    ]:
        with pytest.raises(error, match=text):
            donate_buffer(source, into=target)
        assert _C.pending() == []


# --- A second mark of a tensor ---


@pytest.mark.parametrize("first_strict", [True, False], ids=["strict first", "into first"])
def test_two_marks_add_up_to_strict_and_into(make, first_strict):
    """Of two tensors of one size, `into=` decides which one XLA can use; the other one is strict."""
    used, lost = make(9), make(9)
    out = lost * 2 + used
    strict = {"strict": "error"}
    for options in (strict, {"into": out}) if first_strict else ({"into": out}, strict):
        donate_buffer(used, **options)
    donate_buffer(lost, strict="off")
    torch_xla.sync(wait=True)
    outcomes = {donor.outcome: donor for donor in donation_report(steps=1).donors}
    assert outcomes["donated"].into_kept is True
    assert is_donated(used)
    assert not is_donated(lost)
    # The same two marks of a tensor that shares its buffer.
    shared = make(7)
    holder = whole_copy(shared)
    target = shared + 1
    for options in (strict, {"into": target}) if first_strict else ({"into": target}, strict):
        donate_buffer(shared, **options)
    with pytest.raises(DonationError, match="another live tensor, which was not donated"):
        torch_xla.sync(wait=True)
    assert (holder + target).shape == (7,)


def test_the_line_is_that_of_the_strictest_mark(make):
    def lines(first, second):
        t = make(3)
        donate_buffer({"a": t}, strict=first)
        donate_buffer({"a": t}, strict=second)
        (mark,) = donation_report().pending
        assert mark.name == "['a']"
        cancel_donation(t)
        return int(mark.where.rpartition(":")[2]) - lines.__code__.co_firstlineno

    assert lines("warn", "error") == 3
    assert lines("error", "warn") == lines("warn", "warn") == 2


def test_a_failed_call_leaves_an_earlier_mark(make):
    """The call of the compiled function is stricter, and takes only its own marks back."""
    t = make(3)
    donate_buffer(t)

    @compile(donate_argnums=0, strict="error")
    def fail(x):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        fail(t)
    assert [mark.outcome for mark in donation_report().pending] == ["pending"]
    cancel_donation(t)


def test_repeated_requests_for_a_pair_are_one_mark(make):
    """A loop that asks again at each iteration does not grow."""
    t = make(6)
    out = t + 1
    for _ in range(50):
        donate_buffer(t, into=out)
    (pending,) = _C.pending()
    assert pending["marks"] == 1
    torch_xla.sync()
    (donor,) = donation_report(steps=1).donors
    assert donor.into_kept and out.tolist() == [1, 2, 3, 4, 5, 6]
