"""The public functions while `TORCH_XLA_DONATE=0` switches the package off: they check their arguments, donate nothing.

Only functions that would donate or read a step are here. The others work on `_absent` instead of the extension module.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
from torch._functorch.partitioners import default_partition

from torch_xla_donate import _config, _host, _marks, _modes, _report, _trees, testing
from torch_xla_donate._checks import check_fraction
from torch_xla_donate._computations import user_computation as computations
from torch_xla_donate._errors import DonationWarning, see
from torch_xla_donate._loops.donations import chosen_arguments
from torch_xla_donate._marks.into import outputs_in_order

if TYPE_CHECKING:
    from torch_xla_donate._tools.hints import Advice

_TEXT = "TORCH_XLA_DONATE=0 switches torch_xla_donate off: nothing is hooked, and nothing is donated."


def donate_buffer(
    tensors: Any, *, into: Any = None, strict: _config.Strict = None, stacklevel: int = 1
) -> contextlib.AbstractContextManager[object]:
    """Checks its arguments."""
    _marks.check_options(strict, stacklevel)
    leaves, names = _trees.flatten(tensors, "tensors")
    for index, leaf in enumerate(leaves):
        tensor, name = _trees.without_wrapper(leaf), _trees.qualified_name("tensors", names.name(index))
        if leaf is not None and not isinstance(tensor, torch.Tensor):
            raise _marks.refusal(leaf, "not_tensor", name)
        if leaf is not None and (tensor.device.type != "xla" or tensor.layout != torch.strided):
            raise _marks.refusal(tensor, "not_xla", name)
    if into is not None:
        outputs_in_order(names, into, len(leaves))
    return contextlib.nullcontext()


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_fn_pure: bool = False,
    *,
    donate: str | Sequence[str] = (),
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> tuple[Any, Any]:
    """`torch_xla.experimental.scan.scan`."""
    from torch_xla.experimental.scan import scan as host_scan

    _marks.check_options(strict, stacklevel)
    chosen_arguments(donate, ("init", "xs"))
    pure = {"is_fn_pure": True} if is_fn_pure else {}  # a release that the hooks do not support may not know it
    with _marks.inside_call.replaced(True):  # a compiled function in the body is a part of it
        result: tuple[Any, Any] = host_scan(fn, init, xs, partition_fn=partition_fn, **pure)
    return result


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_layer_pure: bool = False,
    *,
    donate: bool = False,
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> Any:
    """`torch_xla.experimental.scan_layers.scan_layers`."""
    from torch_xla.experimental.scan_layers import scan_layers as host_scan_layers

    _marks.check_options(strict, stacklevel)
    pure = {"is_layer_pure": True} if is_layer_pure else {}
    with _marks.inside_call.replaced(True):
        return host_scan_layers(list(layers), input_data, partition_fn=partition_fn, **pure)


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: tuple[torch.Tensor, ...],
    model: torch.nn.Module,
    *carried_tensors: torch.Tensor,
    donate: str | Sequence[str] = (),
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> Any:
    """The same computation as a loop in Python. torch_xla's function returns the carried tensors in another order."""
    _marks.check_options(strict, stacklevel)
    chosen_arguments(donate, ("iterable_tensors", "carried_tensors"))
    carried: Sequence[torch.Tensor] = carried_tensors
    count = len(iterable_tensors[0])
    total = torch.zeros((), device=iterable_tensors[0].device)
    for index in range(count):
        with _marks.inside_call.replaced(True):
            result = train_step(*(tensor[index] for tensor in iterable_tensors), *carried)
        loss, *rest = result if carried_tensors else (result,)
        carried = [tensor.detach() for tensor in rest]
        (loss / count).backward()
        total = total + loss.detach() / count
    return (total, *carried) if carried_tensors else total


def user_computation(
    name: str,
    inputs: Sequence[torch.Tensor],
    computation: Any,
    *,
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> list[torch.Tensor]:
    """Calls the computation."""
    _marks.check_options(strict, stacklevel)
    module = computations._module(computation)
    tensors = [_trees.without_wrapper(tensor) for tensor in inputs]
    module.check(tensors, _trees.FixedNames([f"inputs[{index}] of {name}" for index in range(len(tensors))]))
    return _host.call_computation(name, tensors, module.callable)


def call_jax(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: Any = None,
    *,
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> Any:
    """`torch_xla.core.xla_builder.call_jax`."""
    _marks.check_options(strict, stacklevel)
    _host.import_jax()
    return _host.call_jax(f, args, kwargs, name, override_hash)


class _Report(_report.DonationReport):
    def __str__(self) -> str:
        return _TEXT


def donation_report(*, steps: int | None = None) -> _report.DonationReport:
    """An empty report, whose text says that the package is switched off."""
    _report.check_steps(steps)
    return _Report((), ())


def advise(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Advice:
    """Calls ``f`` twice, as two steps, and has nothing to say."""
    from torch_xla_donate._tools import advise as tool  # training needs no tools
    from torch_xla_donate._tools.hints import Advice

    class NoAdvice(Advice):
        def __str__(self) -> str:
            return _TEXT

    tool.check_callable(f)
    for _ in range(2):
        torch_xla.sync()
        f(*args, **kwargs)
    torch_xla.sync()
    return NoAdvice()


def assert_donated(tensors: Any) -> None:
    """Checks its arguments."""
    testing._leaves(tensors)


def assert_reused(at_least: float = 0.95, *, steps: int | None = None) -> None:
    """Checks its arguments."""
    check_fraction("at_least", at_least)
    _report.check_steps(steps)


#: What replaces the functions of the same name.
PLAIN = {
    function.__name__: function
    for function in (
        *(advise, call_jax, donate_buffer, donation_report, gradient_accumulation),
        *(scan, scan_layers, user_computation),
    )
}


def start() -> None:
    """Switches the guards off, which would fail without donation, and says that the package is off."""
    for function in (assert_donated, assert_reused):
        setattr(testing, function.__name__, function)
    _modes.expect_donated.finish = _modes.ThreadMode.finish  # type: ignore[method-assign]
    warnings.warn(f"{_TEXT} Unset it to donate. {see('switched_off')}", DonationWarning, stacklevel=3)
