"""Knowledge of torch.compile."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch_xla
from torch.nn.modules import module as modules

from torch_xla_donate import _C
from torch_xla_donate._host.load import xlac


def _not_computed(values: Iterable[Any]) -> list[torch.Tensor]:
    """The XLA tensors among some values that have no buffer yet."""
    tensors = [one for one in values if isinstance(one, torch.Tensor) and one.device.type == "xla"]
    return list(itertools.compress(tensors, xlac()._check_tensor_need_materialization(tensors)))


def compute_pending(arguments: Sequence[Any]) -> None:
    """Runs all pending work if a graph's argument is pending.

    The arguments alone are not enough before a donation. A part of the pending work that updates a tensor in place
    overwrites the old value, which other pending work may still read.
    """
    if _not_computed(arguments):
        torch_xla.sync(wait=True, reset_scope=False)


def compute_alone(values: Iterable[Any]) -> None:
    """Computes the pending tensors among some values, and nothing else, without any donation.

    torch_xla's own donation of what the work updates in place is off, too: other pending work may read the old value.
    """
    tensors = _not_computed(values)
    if tensors:
        xlac()._xla_sync_multi(tensors, [], wait=True, sync_xla_data=False)


def let_operators_pass(model: torch.fx.GraphModule, mode: type, check: Callable[[Any], None]) -> None:
    """Registers the higher-order operators of a graph for a dispatch mode, which calls `check` after each of them.

    torch.compile makes one of a user's operation that updates its arguments.
    """
    for node in model.graph.nodes:
        hop = node.target
        if isinstance(hop, torch._ops.HigherOrderOperator) and mode not in hop.python_key_table:

            def passed(running: Any, *args: Any, hop: Any = hop, **kwargs: Any) -> Any:
                result = hop(*args, **kwargs)
                check(running)
                return result

            hop.py_impl(mode)(passed)


@dataclasses.dataclass(frozen=True)
class CapturedFrame:
    """The frame that torch.compile is compiling.

    Attributes:
        code: the code of the frame.
        returned: names of the graph's inputs that the frame returns unchanged.
        around: guard expressions for other values that the frame returns or stores without computing them.
    """

    code: types.CodeType
    returned: frozenset[str]
    around: tuple[str, ...]

    def values_around(self) -> list[Any]:
        """The values of the expressions in the nearest running frame of this code. May raise any exception."""
        if not self.around:
            return []
        frame: types.FrameType | None = sys._getframe(1)
        # Equal for a code and for what torch.compile makes of it.
        source = operator.attrgetter("co_filename", "co_firstlineno", "co_name")
        while frame is not None and source(frame.f_code) != source(self.code):
            frame = frame.f_back
        if frame is None:
            raise LookupError(f"no frame of {self.code.co_name} is running")
        from torch._dynamo import guards

        scope = {**guards._get_closure_vars(), "L": _C.frame_variables(frame), "G": frame.f_globals}
        return [eval(expression, scope) for expression in self.around]


def captured_frame(inputs: Iterable[str]) -> CapturedFrame | None:
    """The frame that the running torch.compile backend captures; None if it is unknown.

    The outputs of a graph do not include a value that the frame returns unchanged. Bytecode around the graph returns
    it. `inputs` has the names of the graph's inputs, which do not include arguments that the graph does not read.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import AttributeMutationNew, VariableTracker

    def is_new_object(variable: Any) -> bool:
        """Whether the frame makes it: it has no value yet. The visit comes to its attributes."""
        made = isinstance(variable.mutation_type, AttributeMutationNew)
        return made and not isinstance(variable, TensorVariable)

    read = set(inputs)
    returned: set[str] = set()
    around: dict[str, None] = {}

    def note(variable: Any) -> None:
        # vars(), because getattr() on a lazy variable would add it to the graph.
        node = getattr(vars(variable).get("proxy"), "node", None)
        if node is not None and node.op == "placeholder" and node.name in read:
            returned.add(node.name)
        elif variable.source is not None and not is_new_object(variable):
            around[variable.source.name()] = None

    try:
        output = InstructionTranslator.current_tx().output
        VariableTracker.visit(note, output.root_tx.stack)
        VariableTracker.visit(note, output.side_effects.store_attr_mutations)
        return CapturedFrame(output.root_tx.f_code, frozenset(returned), tuple(around))
    except (AttributeError, NotImplementedError):
        return None


def wrapping_code() -> types.CodeType:
    """The code of torch.compile's wrapper around a callable that has no frame or belongs to torch."""
    from torch._dynamo.external_utils import wrap_inline

    return wrap_inline(len).__code__


def hooks_of(module: torch.nn.Module) -> tuple[int, ...]:
    """The numbers of the module's own hooks. torch gives each number once, in rising order."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return ()  # first, because each call asks all modules, and most have none
    return (
        *module._forward_hooks,
        *module._forward_pre_hooks,
        *module._backward_hooks,
        *module._backward_pre_hooks,
    )


def global_hooks() -> list[int]:
    """The numbers of the hooks that all modules run, except this package's."""
    return [
        number
        for hooks in (
            modules._global_forward_hooks,
            modules._global_forward_pre_hooks,
            modules._global_backward_hooks,
            modules._global_backward_pre_hooks,
        )
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch_xla_donate.")
    ]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    return bool(type(module).__call__ is not torch.nn.Module.__call__ or hooks_of(module) or global_hooks())
