"""Refuses reads on the host inside a trace, and other actions that a replay would not repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xla_donate import _frames, _host, _numbers, _trees
from torch_xla_donate._errors import DonationError, see

_OF_TORCH = ("aten", "prim", "prims", "profiler", "xla")
_RETURN_IT = "Return the tensor and read it outside"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _seed() -> bytes:
    """The state of the generator on the host. As bytes, because a trace of a scan's body takes no real tensors."""
    return bytes(torch.default_generator.get_state().numpy())


class Refusal:
    """Makes the error for an action that a replay would not repeat, or that `lower` cannot trace.

    is_pure: whether the function is declared pure. Else it is lowered.
    """

    def __init__(self, function: str, is_pure: bool = True) -> None:
        self._function, self._is_pure = function, is_pure

    def __call__(self, what: str, remedy: str, where: str | None = None) -> DonationError:
        """The error. where: the line, by default that of the running operation; empty if no line is known."""
        where = _frames.call_site() if where is None else where
        at = f"at {where} it" if where else "it"
        if not self._is_pure:
            return DonationError(f"{self._function} cannot be lowered, because {at} {what}. {remedy}. {see('ahead')}")
        return DonationError(
            f"{self._function} is declared pure, but {at} {what}. {remedy}, or remove pure=True. Nothing was donated. "
            f"{see('pure')}"
        )


class HostReads(TorchDispatchMode):
    """Refuses to copy a value to the host, because a replay would not do it again.

    Attributes:
        drew: whether an operation drew random numbers on the host.
        numbers: the numbers in the running operation. If there are any, the error names them.
    """

    def __init__(self, refuse: Callable[..., Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse
        self.drew = False
        self.numbers: Sequence[_numbers.Number] = ()
        self._transfers = _host.transfers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense or str(kwargs.get("device", "xla")) == "cpu":
            self._refuse_tensors((args, kwargs))
        # Autograd's tensor of zeros without memory, as in second derivatives. It cannot become a Python object.
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default
        # Only torch's own operations say whether they draw random numbers.
        seed = None if func.namespace in _OF_TORCH else _seed()
        # Or the recorder would see what a wrapper holds, as in a scripted module.
        with torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call]
            result = func(*args, **kwargs)
        self.drew = self.drew or (seed is not None and seed != _seed())
        if all(tensor.device.type != "xla" for tensor in tensors_of((args, kwargs))):
            result = pytree.tree_map_only(torch.Tensor, _host.tracked_views, result)
        on_host = any(tensor.device.type == "cpu" for tensor in tensors_of(result))
        if torch.Tag.nondeterministic_seeded in func.tags:
            if on_host and kwargs.get("generator") is not None:
                raise self.refuse_draw()
            self.drew = self.drew or on_host
        elif on_host:  # such as copy_ to a tensor on the host
            self._refuse_tensors((args, kwargs))
        self.check(None)
        return result

    def _refuse_tensors(self, arguments: Any) -> None:
        for tensor in tensors_of(arguments):
            if tensor.device.type == "xla":
                if self.numbers:
                    raise self.numbers[0].refuse(self.numbers)
                raise self.refuse_read(tensor)

    def refuse_read(self, tensor: torch.Tensor) -> Exception:
        return self._refuse(f"reads {_trees.dtype_and_shape(tensor)} on the host", _RETURN_IT)

    def refuse_draw(self) -> Exception:
        return self._refuse(
            "draws random numbers on the host, which a replay would not draw again",
            'Draw them on the device (device="xla")',
        )

    def check(self, where: str | None = "unknown line") -> None:
        """Raises DonationError if an operation has read on the host, as operations without an XLA lowering do."""
        # Both counts have to change: other threads may read, and this one may wait without reading.
        if all(now != before for now, before in zip(_host.transfers(), self._transfers)):
            raise self._refuse("reads a tensor on the host", _RETURN_IT, where)


@contextlib.contextmanager
def host_reads_refused(refuse: Callable[..., Exception]) -> Iterator[None]:
    """Turns torch_xla's error for an execution inside the trace into one that names the line."""
    try:
        yield
    except RuntimeError as error:
        if not _host.is_refused_execution(error):
            raise
        what = "makes torch_xla run something, as a read on the host or an operation that XLA lacks does"
        raise refuse(what, _RETURN_IT, _frames.line_of(error)) from error
