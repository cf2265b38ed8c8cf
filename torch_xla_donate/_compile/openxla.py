"""compile(f, backend="openxla"): torch.compile's graphs consume only the arguments that a call donates."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext

from torch_xla_donate import _C, _config, _host, _trace, _trees
from torch_xla_donate._compile.arguments import Arguments, CallArguments
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.donation import NOT_READ, RunDonation, leaves_of_call, signature_of
from torch_xla_donate._compile.program import TracedGraph, own_result
from torch_xla_donate._compile.proxies import tensors_among
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._host import interrupts

#: The call whose function torch.compile runs on this thread, and what it donates.
_running: interrupts.PerThread[tuple[OpenxlaCompiled, RunDonation] | None] = interrupts.per_thread(None)


class Graph:
    """A graph that torch.compile has captured. Each set of donated positions is compiled separately at its first call.

    Args:
        model: the graph, functional, with flat inputs and outputs.
        kept: positions of inputs that outlive the graph, because autograd saves them or the function returns them.
        refusal: the reason why this graph cannot consume donors; no reason if it can.
        frame: the frame that the graph is a part of.
        donates: whether it may consume donors of the running call; a backward graph does not.
    """

    def __init__(
        self,
        model: torch.fx.GraphModule,
        kept: frozenset[int],
        refusal: _C.Reason,
        frame: _host.CapturedFrame | None,
        donates: bool = True,
    ) -> None:
        self._model, self._donates = model, donates
        self._kept = kept
        self._frame = frame
        self._is_resumed = frame is not None and frame.code.co_name.startswith(_RESUMED)
        self._refusal = refusal
        self._runs_on_host = self._drew = False
        self._unread = refusal or NOT_READ  # code that may read this graph's donors may also read other donors
        self._variants: dict[Any, _FunctionalGraph] = {}  # such a graph never runs if a result holds a donated buffer

    def __call__(self, *args: Any) -> Any:
        with _on_device_of(args):
            try:
                return self._call(args)
            except RuntimeError as error:
                if not _host.is_evicted(error):
                    raise
            self._variants = {}
            return self._call(args)

    def _call(self, args: Sequence[Any]) -> Any:
        compiled, donation = (self._donates and _running.value) or (None, None)
        if donation is not None and donation.unread.code in ("no_graph", "not_read"):
            donation.unread = self._unread
        if compiled is not None and donation is not None and not self._refusal:
            if not compiled.contains(self._frame):
                # Beyond its limit of recompilations torch.compile runs inner frames by graphs of other functions.
                donation.refuse(args, _C.Reason("partial_graph"))
            _host.compute_pending(args)
            if self._is_resumed:  # the part of the function before the break may have read the donors, or kept them
                donation.refuse_shared()
            self._refuse_kept(donation, args)
        else:
            _host.compute_alone(args)
        while True:
            if donation is not None and self._refusal:  # set at the start, or by a trace
                donation.refuse(args, self._refusal)
            if self._runs_on_host:
                return self._run_by_operations(args)
            positions = donation.positions(args) if donation is not None else ()
            # XLA makes one parameter of arguments that share memory, and a graph is for these numbers and shardings.
            # torch.compile guards none of these.
            found = signature_of(list(args))
            key = (positions, found.key, _trees.exact(found.others), _host.shardings(args))
            graph = self._variants.get(key)
            if graph is None:
                try:
                    self._variants[key] = _FunctionalGraph(self._model, args, positions)
                except _RunsOnHost as reason:
                    self._note_host(reason)
                    if donation is not None:
                        donation.refuse(args, _HOST_OPERATIONS)
                    return self._run_by_operations(args)
                # An operation of a user may have kept tensors of the trace.
                if donation is not None and donation.newly_shared():
                    donation.refuse_shared()
                continue
            if donation is None or not donation.refuse([args[i] for i in graph.returned], _STILL_NEEDED):
                break
        if donation is None or self._refusal:
            return graph.run_graph(args)
        with graph.consumed(donation, args):
            return graph.run_graph(args)

    def _note_host(self, reason: _RunsOnHost) -> None:
        """Random numbers count when they are seen again: another thread may have drawn the first ones."""
        if self._drew or not reason.drew:
            self._runs_on_host, self._refusal = True, _HOST_OPERATIONS
        self._drew = True

    def _run_by_operations(self, args: Sequence[Any]) -> Any:
        results = self._model(*args)
        _host.compute_alone(results)
        return results

    def _refuse_kept(self, donation: RunDonation, args: Sequence[Any]) -> None:
        """Refuses arguments that outlive the graph, as far as they are known before its trace."""
        donation.refuse([args[i] for i in self._kept], _STILL_NEEDED)
        try:
            around = self._frame.values_around() if self._frame is not None else []
        except Exception as error:  # from evaluating torch.compile's expressions
            donation.refuse_all(_C.Reason("perhaps_returned", repr(error)))
            return
        donation.refuse(_trees.tensors_in(around), _STILL_NEEDED)


class _RunsOnHost(Exception):
    """A part of a graph runs on the host, or reads a value there.

    drew: whether random numbers were drawn on the host, maybe by another thread, and nothing else was seen.
    """

    def __init__(self, drew: bool = False) -> None:
        super().__init__()
        self.drew = drew


class _FunctionalGraph(TracedGraph):
    """A graph of torch.compile, traced with these arguments, of which its runs may consume those at `positions`.

    Raises _RunsOnHost.
    """

    def __init__(self, model: torch.fx.GraphModule, arguments: Sequence[Any], positions: Sequence[int]) -> None:
        def refuse(*_: Any) -> Exception:
            return _RunsOnHost()

        if _trees.first_off_device(arguments) is not None:
            raise _RunsOnHost
        # A constant of the graph may have the buffer of such an argument, and would follow the argument.
        arguments = [_host.computed(one) if _is_constant(one) else one for one in arguments]
        trace = _host.Tracing()
        with trace:
            leaves = [_host.stand_in(one) if isinstance(one, torch.Tensor) else one for one in arguments]
            before = [_C.identity(one) for _, one in tensors_among(leaves)]
            _host.let_operators_pass(model, _trace.HostReads, _trace.HostReads.check)
            reads = _trace.HostReads(refuse)
            with interrupts.Restored(), torch.no_grad(), _trace.host_reads_refused(refuse), reads:
                results = model(*leaves)
            reads.check()
            given = [_C.identity(one) for _, one in tensors_among(leaves)]
            if reads.drew or given != before:  # a custom operation that updates an argument
                raise _RunsOnHost(drew=given == before)
            own = [own_result(leaf, {identity for identity, _ in given}) for leaf in results]
            graph = self._compile(own, leaves, positions, {}, {})
        if self._connect(graph, trace, leaves) is not None:
            raise _RunsOnHost


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(_C.is_constant(value))


def _on_device_of(args: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the device of a graph's inputs is the current one. Raises ValueError if there are several."""
    devices = _C.devices(list(args))
    if len(devices) > 1:
        raise ValueError(
            f"torch.compile has captured a graph with inputs on xla:{devices[0]} and xla:{devices[1]}, but a compiled "
            f'graph runs on one device. Move them to one device, or use backend="lazy". {see("torch_compile")}'
        )
    return _host.on_device(devices)


class OpenxlaCompiled(Compiled):
    """Runs the function through `torch.compile(backend="openxla")`."""

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: _config.Strict, **options: Any) -> None:
        super().__init__(f, arguments, strict)
        self._codes = _codes_of(f)
        self._module = f if isinstance(f, torch.nn.Module) else None
        self._options = options
        self._compiled = torch.compile(f, backend=self._capture, **options)
        self._with_hooks: tuple[tuple[int, ...], Callable[..., Any]] = (), self._compiled

    def _run(self, call: CallArguments, where: str) -> Any:
        _host.run_step_closures()
        compiled = self._compiled_for(() if self._module is None else _host.hooks_of(self._module))
        if not call.roles.donated:
            return compiled(*call.args, **call.kwargs)
        leaves, parts = leaves_of_call(call)
        with self.on_device(call, _C.devices(leaves)), RunDonation(self, call, parts, where) as donation:
            del leaves, parts  # the function may drop an argument
            donation.unread = _C.Reason("no_graph")  # until a graph runs
            with _running.replaced((self, donation)):
                result = compiled(*call.args, **call.kwargs)
            _C.keep_returned(_trees.tensors_in(result))
            return result

    def _compiled_for(self, hooks: tuple[int, ...]) -> Callable[..., Any]:
        """torch.compile does not look for new hooks of the module, but compiles again for another backend."""
        known = self._with_hooks
        if hooks and known[0] != hooks:
            backend = functools.partial(self._capture)
            known = self._with_hooks = hooks, torch.compile(self._f, backend=backend, **self._options)
        return known[1] if hooks else self._compiled

    def _capture(self, model: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that torch.compile calls for each graph: as openxla's, but each graph runs as a `Graph`."""
        from torch._dynamo.backends.common import aot_autograd

        inputs_of_graph = [node.name for node in model.graph.nodes if node.op == "placeholder"]
        frame = _host.captured_frame(inputs_of_graph)
        refusal = self._examine(model, frame)
        names = frozenset() if frame is None else frame.returned
        returned = frozenset(position for position, name in enumerate(inputs_of_graph) if name in names)

        given = len({id(one) for one in inputs if isinstance(one, torch.Tensor)})
        given += sum(not isinstance(one, torch.Tensor) for one in inputs)

        def forward(graph: torch.fx.GraphModule, fake: Sequence[Any]) -> Callable[..., Any]:
            graph_inputs = graph.graph.find_nodes(op="placeholder")
            if len(graph_inputs) < given:  # torch.compile has merged views of one tensor, because one is updated
                return make_boxed_func(self._refuse_merged)  # type: ignore[no-any-return, no-untyped-call]
            kept = _handed_on(graph, graph_inputs)
            why = _C.Reason("unknown_outputs" if kept is None else "none")
            return make_boxed_func(Graph(graph, returned | (kept or frozenset()), refusal or why, frame))  # type: ignore[no-any-return, no-untyped-call]

        def backward(graph: torch.fx.GraphModule, fake: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(Graph(graph, frozenset(), _C.Reason("none"), None, donates=False))  # type: ignore[no-any-return, no-untyped-call]

        backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, decompositions=_host.PURE_COPIES)
        return backend(model, inputs)  # type: ignore[no-any-return]

    def _refuse_merged(self, *args: Any) -> Any:
        """Raises DonationError: torch.compile reads a view through strides, which an XLA tensor does not have."""
        raise DonationError(
            f"{self.function} updates in place an argument that is a view of another argument, and torch.compile "
            'computes wrong values for it on XLA. Pass a .clone() of the view, or use backend="lazy". '
            f"Nothing was donated. {see('torch_compile')}"
        )

    def _examine(self, model: torch.fx.GraphModule, frame: _host.CapturedFrame | None) -> _C.Reason:
        """The reason why this graph must not consume donors; no reason if it may."""
        reason = getattr(model, "compile_subgraph_reason", None)
        if reason is None or reason.graph_break:
            return _C.Reason("graph_break")
        if self._module is not None and _host.has_hooks(self._module):
            return _C.Reason("module_hooks")
        return _C.Reason() if self.contains(frame) else _C.Reason("partial_graph")

    def contains(self, frame: _host.CapturedFrame | None) -> bool:
        """Whether a frame is the function, or its rest after a graph break."""
        return frame is not None and any(_is_part_of(frame.code, whole) for whole in self._codes)


_RESUMED = "torch_dynamo_resume_in_"  # torch.compile's name of a frame after a graph break
_HOST_OPERATIONS = _C.Reason("host_operations")
_STILL_NEEDED = _C.Reason("still_needed")


def _codes_of(f: Callable[..., Any]) -> list[types.CodeType]:
    """The code of the frames that torch.compile may capture for a callable: the callable's, or torch's wrapper."""
    codes = [_host.wrapping_code()]
    call = f.forward if isinstance(f, torch.nn.Module) else f
    for function in (call, getattr(call, "__func__", None), type(call).__call__):
        if isinstance(function, types.FunctionType):
            return [*codes, function.__code__]
    return codes


def _is_part_of(code: types.CodeType, whole: types.CodeType) -> bool:
    """Whether code belongs to the function, or to its rest after a graph break."""
    resumed = code.co_name.startswith(f"{_RESUMED}{whole.co_name}_at_")
    return code is whole or (resumed and code.co_filename == whole.co_filename)


def _handed_on(graph: torch.fx.GraphModule, inputs: Sequence[torch.fx.Node]) -> frozenset[int] | None:
    """Positions of the inputs that outlive the graph; None if torch.compile does not report it for each input."""
    returned = set(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    kept = {position for position, node in enumerate(inputs) if node in returned}
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or len(metadata.input_info) != len(inputs):
        return None
    for output in metadata.output_info:
        if output.output_type in (OutputType.alias_of_input, OutputType.is_input):
            kept.add(output.base_idx)  # type: ignore[arg-type]
    return frozenset(kept)
