"""scan and scan_layers: what a body donates, and what autograd keeps."""

from __future__ import annotations

import gc

import pytest
import torch
import torch_xla
from helpers import dump_env, run_script
from torch_xla.experimental.scan import scan as host_scan

from torch_xla_donate import (
    DonatedBufferError,
    DonationError,
    DonationWarning,
    _nested,
    donate_buffer,
    donation_report,
    hlo,
    is_donated,
    scan,
    scan_layers,
)


def accumulate(carry, x):
    return {"sum": carry["sum"] + x, "same": carry["same"]}, carry["sum"] * x


def donating(carry, x):
    donate_buffer(carry["sum"])
    return accumulate(carry, x)


def arguments(make):
    return {"sum": make(3), "same": make(2)}, make(4, 3)


@pytest.mark.parametrize("is_fn_pure", [False, True])
def test_a_leaf_of_the_carry_that_the_body_donates_is_donated_at_every_call(make, is_fn_pure):
    expected, expected_ys = host_scan(accumulate, *arguments(make))
    for _ in range(3):
        init, xs = arguments(make)
        final, ys = scan(donating, init, xs, is_fn_pure=is_fn_pure)
        torch_xla.sync()
        assert (is_donated(init["sum"]), is_donated(init["same"]), is_donated(xs)) == (True, False, False)
        assert torch.equal(final["sum"].cpu(), expected["sum"].cpu())
        assert torch.equal(final["same"].cpu(), expected["same"].cpu())
        assert torch.equal(ys.cpu(), expected_ys.cpu())
        (donor,) = donation_report(steps=1).donors
        assert (donor.name, donor.outcome) == ("init['sum']", "donated")
        assert "test_scan.py" in donor.where
    with pytest.raises(DonatedBufferError, match=r"init\['sum'\]"):
        init["sum"] + 1


def test_a_slice_that_the_body_donates_stands_for_the_whole_of_it(make):
    def body(carry, x):
        donate_buffer(x)
        return carry + x, carry * x

    init, xs = make(3), make(4, 3)
    kept = scan(body, init, xs)
    torch_xla.sync()
    assert (is_donated(init), is_donated(xs)) == (False, True)
    assert kept[0].tolist() == [18, 23, 28]


def test_init_and_xs_are_donated_from_outside(make):
    init, xs = arguments(make)
    kept = scan(accumulate, init, xs, donate=("init", "xs"))
    torch_xla.sync()
    del kept
    assert all(map(is_donated, (init["sum"], init["same"], xs)))
    with pytest.raises(ValueError, match='donate is \'ys\'; it takes "init", "xs" or both'):
        scan(accumulate, *arguments(make), donate="ys")


def test_the_carry_is_aliased_to_the_final_carry_in_the_hlo(tmp_path):
    run_script(
        """
        import torch, torch_xla
        from torch_xla_donate import scan
        init, xs = torch.ones(64, 64).to("xla"), torch.ones(5, 64, 64).to("xla")
        torch_xla.sync(wait=True)
        final, ys = scan(lambda carry, x: (carry * 2 + x, carry.sum()), init, xs, donate="init")
        torch_xla.sync(wait=True)
        assert final[0, 0].item() == 63 and ys.shape == (5,)
        """,
        env=dump_env(tmp_path),
    )
    aliased = [found.after for found in hlo.read_dump(tmp_path) if found.after is not None and found.after.aliases]
    assert [module.aliased_bytes for module in aliased] == [64 * 64 * 4]


def test_what_autograd_has_saved_is_not_donated_and_the_gradients_are_right(make):
    def run(function, **options):
        weights, init = make(4, 3).requires_grad_(), make(3)
        final, _ = function(lambda carry, w: (carry * w + 1, carry), init, weights, **options)
        return weights, init, final

    with pytest.warns(DonationWarning, match="init: autograd has saved it for the backward scan"):
        weights, init, final = run(scan, donate="init")
    torch_xla.sync()
    assert not is_donated(init)
    final.sum().backward()
    expected_weights, _, expected = run(host_scan)
    expected.sum().backward()
    assert torch.equal(weights.grad.cpu(), expected_weights.grad.cpu())
    with torch.no_grad():
        _, init, _ = run(scan, donate="init")
    torch_xla.sync()
    assert is_donated(init)


def test_tensors_that_the_body_makes_and_pending_arguments_are_refused(make):
    def body(carry, x):
        donate_buffer(carry + 1)
        return carry + x, carry

    with pytest.raises(DonationError, match="which the body of scan has made or sliced"):
        scan(body, make(3), make(2, 3))
    with pytest.raises(DonationError, match="init is float32.3. on xla:0, not materialised"):
        scan(lambda carry, x: (carry + x, carry), xs=make(2, 3), init=make(3) + 1, donate="init")
    torch_xla.sync()


def test_a_tensor_from_outside_is_donated_as_ever(make):
    outside = make(3)

    def body(carry, x):
        donate_buffer(outside)
        return carry + x, carry

    kept = scan(body, make(3), make(2, 3)), outside * 2
    torch_xla.sync()
    del kept
    assert is_donated(outside)


def test_layers_donate_their_input(make):
    class Layer(torch.nn.Linear):
        donates = False

        def forward(self, x):
            if self.donates:
                donate_buffer(x)
            return super().forward(x)

    layers = [Layer(4, 4).to("xla") for _ in range(3)]
    with torch.no_grad():
        expected = torch.nn.Sequential(*layers)(make(2, 4)).cpu()
        for inside in (False, True):
            Layer.donates = inside
            x = make(2, 4)
            result = scan_layers(layers, x, donate=not inside)
            torch_xla.sync()
            assert is_donated(x)
            assert torch.allclose(result.cpu(), expected, atol=1e-5)


def test_layers_that_need_gradients_keep_their_input_and_get_the_right_ones(make):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4).to("xla") for _ in range(3)]
    x = make(2, 4).requires_grad_()
    with pytest.warns(DonationWarning, match="autograd has saved it for the backward scan"):
        result = scan_layers(layers, x, donate=True)
    torch_xla.sync()
    assert not is_donated(x)
    result.sum().backward()
    found = [x.grad, *(layer.weight.grad for layer in layers)]
    x.grad = None
    for layer in layers:
        layer.zero_grad()
    torch.nn.Sequential(*layers)(x).sum().backward()
    expected = [x.grad, *(layer.weight.grad for layer in layers)]
    assert all(torch.allclose(one.cpu(), other.cpu(), atol=1e-5) for one, other in zip(found, expected))


def by_hand(fn, carry, xs, **options):
    """What a scan computes."""
    ys = []
    for x in xs:
        carry, y = fn(carry, x)
        ys.append(y)
    return carry, {name: torch.stack([y[name] for y in ys]) for name in ys[0]}


def nested(depth, loop, **options):
    """A body with a loop in it, that many times."""

    def innermost(carry, x):
        return carry * 0.5 + x["a"] * torch.sin(carry), {"sum": carry.sum(), "made": x["a"] + carry}

    def around(body):
        def outer(carry, x):
            carry, ys = loop(body, carry * 2, x, **options)
            return carry - 1, ys

        return outer

    body = innermost
    for _ in range(depth):
        body = around(body)
    return body


@pytest.mark.parametrize("is_fn_pure", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_body_may_scan_itself_and_the_gradients_are_right(depth, is_fn_pure):
    init = torch.linspace(-1, 1, 3)
    xs = {"a": torch.linspace(-2, 1, 3 * 2 ** (depth + 1)).reshape(*[2] * (depth + 1), 3)}

    def run(loop, device, **options):
        leaves = [t.to(device).requires_grad_() for t in (init, xs["a"])]
        # The slices of a dictionary, where the loop is Python's.
        rows = {"a": leaves[1]} if device == "xla" else sliced(leaves[1], depth)
        body = nested(depth, loop, **options)
        carry, ys = loop(body, leaves[0], rows, **options)
        (carry.sum() + ys["made"].pow(2).sum()).backward()
        return [t.detach().cpu() for t in (carry, ys["sum"], ys["made"], *(leaf.grad for leaf in leaves))]

    def sliced(tensor, levels):
        return [sliced(row, levels - 1) if levels else {"a": row} for row in tensor]

    # torch_xla's first: autograd counts the devices once.
    both = [run(scan, "xla", is_fn_pure=is_fn_pure) for _ in range(2)]
    expected = run(by_hand, "cpu")
    for found in both:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected))


def test_an_inner_scan_is_a_loop_on_the_device_inside_of_the_outer_one(make):
    final, _ = scan(nested(1, scan), make(3), {"a": make(40, 50, 3)})
    text = torch_xla._XLAC._get_xla_tensors_hlo([final])
    torch_xla.sync()
    assert text.count(" while(") == 2


@pytest.mark.parametrize(
    ("draw", "name"), [(torch.rand_like, "rand_like"), (torch.nn.functional.dropout, "native_dropout"), (None, None)]
)
def test_random_numbers_in_an_inner_scan_are_refused(make, draw, name):
    def inner(carry, x):
        return carry + x, carry if draw is None else draw(carry) * carry

    def run():
        return scan(lambda carry, x: scan(inner, carry, x), make(2), make(3, 4, 2))

    if draw is None:
        run()
    else:
        with pytest.raises(NotImplementedError, match=f"draws random numbers .aten.{name}"):
            run()
    torch_xla.sync()


def test_the_outer_body_of_nested_scans_may_draw_random_numbers(make):
    def outer(carry, x):
        final, _ = scan(lambda c, y: (c + y, c), carry, x)
        return final, torch.rand_like(carry) + carry * 0

    _, ys = scan(outer, make(2), make(3, 4, 2))
    assert len(set(ys.flatten().tolist())) == 6


def test_what_an_inner_body_donates_is_the_outer_argument_that_it_stands_for(make):
    def inner(carry, x):
        donate_buffer(carry)
        return carry + x, carry.sum()

    init, xs = make(3), make(2, 4, 3)
    final, _ = scan(lambda carry, x: scan(inner, carry, x), init, xs)
    torch_xla.sync()
    assert (is_donated(init), is_donated(xs)) == (True, False)
    assert final.tolist() == [84, 93, 102]
    assert [(donor.name, donor.outcome) for donor in donation_report(steps=1).donors] == [("init", "donated")]
    with pytest.raises(DonationError, match="which the body of scan has made or sliced"):
        scan(lambda carry, x: scan(inner, carry * 2, x), make(3), xs)


def test_nested_scans_leave_nothing_behind(make):
    from torch_xla.experimental import scan as module

    before = (module._scan_impl_flat, module.value_and_grad_partitioned)

    def once():
        init = make(3).requires_grad_()
        final, _ = scan(nested(2, scan), init, {"a": make(2, 2, 2, 3)})
        gc.collect()
        final.sum().backward()  # its loops are alive
        torch_xla.sync()

    def fails(carry, x):
        raise RuntimeError("a body that fails")

    once()
    gc.collect()
    assert (module._scan_impl_flat, module.value_and_grad_partitioned) == before
    assert (len(_nested._loops), _nested._holders) == (0, [])
    with pytest.raises(RuntimeError, match="a body that fails"):
        scan(lambda carry, x: scan(fails, carry, x), make(3), make(2, 2, 3))
    assert (module._scan_impl_flat, module.value_and_grad_partitioned) == before
    assert _nested._holders == []
    torch_xla.sync()


def test_scans_on_two_threads_do_not_wait_for_each_other_for_ever():
    run_script(
        """
        import threading, torch, torch_xla
        from torch_xla_donate import _host, _nested
        inside, leave = threading.Event(), threading.Event()
        def other():
            with _nested.allowed([]):
                inside.set()
                assert leave.wait(60)
        worker = threading.Thread(target=other)
        with _nested.allowed([]):
            worker.start()
            assert inside.wait(60)
        leave.set()
        worker.join()
        from torch_xla.experimental import scan as host
        assert host._scan_impl_flat.__module__ == "torch_xla.experimental.scan"
        free = []
        third = threading.Thread(target=lambda: free.append(_host._compiling.acquire(timeout=10)))
        third.start()
        third.join()
        assert free == [True]
        """
    )


def test_an_inner_scan_without_outputs_to_go_back_over_is_refused():
    init, rows = torch.zeros(3).to("xla"), torch.ones(2, 4, 3).to("xla")
    torch_xla.sync()

    def body(carry, row):
        carry, _ = scan(lambda c, x: (c + x, None), carry, row)
        return carry, carry.sum()

    with pytest.raises(NotImplementedError, match="backward pass with nothing to go over.*such as the new carry"):
        scan(body, init, rows)
