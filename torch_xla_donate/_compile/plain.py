"""compile(f) while `TORCH_XLA_DONATE=0` switches the package off: a step that donates nothing."""

from __future__ import annotations

from typing import Any

import torch_xla

from torch_xla_donate._compile.base import Compiled, check_static
from torch_xla_donate._compile.lower import Lowered
from torch_xla_donate._errors import DonationError, see


class PlainCompiled(Compiled):
    """Runs the function, and then all pending work. For all backends, since each computes the same values."""

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for argument in self._arguments.roles(args, kwargs).static:
            check_static(argument, argument.value(args, kwargs))
        torch_xla.sync()  # pending work is a step of its own
        result = self.body(*args, **kwargs)
        torch_xla.sync()
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Raises DonationError, because a lowering without the package has neither donors nor their outcome."""
        raise DonationError(
            f"lower of {self.function} needs the hooks, which TORCH_XLA_DONATE=0 keeps out of this process. Unset it "
            f"to lower a function. {see('switched_off')}"
        )
