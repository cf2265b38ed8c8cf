"""Refuses reads on the host inside a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xla_donate import _frames, _host, _numbers, _trees
from torch_xla_donate._errors import DonationError
from torch_xla_donate._trace.refusals import RETURN_IT, impure, tensors_of

Refusal = Callable[[str, str, str, str], DonationError]  # as `impure`


class HostReads(TorchDispatchMode):
    """Refuses to copy a value to the host, because a replay would not do it again.

    Attributes:
        drew: whether an operation drew random numbers on the host.
        numbers: the numbers in the running operation. If there are any, the error names them.
    """

    def __init__(self, function: str, refusal: Refusal = impure) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function, self._refusal = function, refusal
        self.drew = False
        self.numbers: Sequence[_numbers.Number] = ()
        self._transfers = _host.transfers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense or str(kwargs.get("device", "xla")) == "cpu":
            self._refuse_tensors((args, kwargs))
        result = func(*args, **kwargs)
        on_host = any(tensor.device.type == "cpu" for tensor in tensors_of(result))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = self.drew or on_host
        elif on_host:  # such as copy_ to a tensor on the host
            self._refuse_tensors((args, kwargs))
        self.check(_frames.call_site)
        return result

    def _refuse_tensors(self, arguments: Any) -> None:
        for tensor in tensors_of(arguments):
            if tensor.device.type == "xla":
                if self.numbers:
                    raise self.numbers[0].refuse(self.numbers)
                what = f"reads {_trees.dtype_and_shape(tensor)} on the host"
                raise self._refusal(self._function, _frames.call_site(), what, RETURN_IT)

    def check(self, where: Callable[[], str] = lambda: "unknown line") -> None:
        """Raises DonationError if an operation has read on the host, as operations without an XLA lowering do."""
        # Both counts have to change: other threads may read, and this one may wait without reading.
        if all(now != before for now, before in zip(_host.transfers(), self._transfers)):
            raise self._refusal(self._function, where(), "reads a tensor on the host", RETURN_IT)


@contextlib.contextmanager
def host_reads_refused(function: str, refusal: Refusal = impure) -> Iterator[None]:
    """Turns torch_xla's error for an execution inside the trace into one that names the line."""
    try:
        yield
    except RuntimeError as error:
        if not _host.is_refused_execution(error):
            raise
        where = _frames.line_of(error)
        what = "makes torch_xla run something, as a read on the host or an operation that XLA lacks does"
        raise refusal(function, where, what, RETURN_IT) from error
