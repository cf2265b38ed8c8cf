"""The one Python module that touches torch_xla's internals; the C++ side's is csrc/host/torch_xla_abi.cpp.

Loading happens in two stages, because a probe tensor would start the XLA runtime, which must not happen at import
(``torch_xla.launch`` and ``xr.use_spmd`` come after it). At import the versions are compared and the hooks installed:
names, slots and the functions behind them. The layouts are verified on a probe tensor when a tensor is first marked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import operator
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_xla_donate import _config
from torch_xla_donate._hlo import HloShape
from torch_xla_donate._numbers import Number

SUPPORTED = ((2, 7), (2, 8), (2, 9))
_REBUILD = (
    "Rebuild torch_xla_donate in this environment: pip install --no-build-isolation --force-reinstall --no-deps ."
)


def _minor(version: str) -> tuple[int, int]:
    """(2, 9) of '2.9.1+cu128'."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def supported_versions() -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


@dataclasses.dataclass(frozen=True)
class Build:
    """What the extension module was built against."""

    torch: str
    torch_xla: str
    cxx11_abi: bool
    compiler: str


def build_record(module: Path) -> Build:
    """Reads the record from the module's file, without loading it: a module of another torch might not load.

    Raises ImportError if the file has no record.
    """
    found = re.search(
        rb"torch_xla_donate build: torch=([^;]+);torch_xla=([^;]+);cxx11_abi=(\d);compiler=([^\0]+)",
        module.read_bytes(),
    )
    if found is None:
        raise ImportError(f"{module} does not say what it was built against. {_REBUILD}")
    torch_version, torch_xla_version, abi, compiler = (group.decode() for group in found.groups())
    return Build(torch_version, torch_xla_version, abi == "1", compiler)


def build() -> Build:
    """The record of this package's module; ImportError if it has not been built."""
    spec = importlib.util.find_spec("torch_xla_donate._C")
    if spec is None or spec.origin is None:
        raise ImportError(f"torch_xla_donate has not been built. {_REBUILD}")
    return build_record(Path(spec.origin))


def check_versions(torch_version: str, torch_xla_version: str, built: Build) -> None:
    """Raises ImportError unless the running torch and torch_xla are supported and those of the build.

    Args:
        torch_version: of the running torch, such as ``2.9.1+cu128``.
        torch_xla_version: of the installed torch_xla.
        built: what the module was built against.
    """
    if _minor(torch_xla_version) not in SUPPORTED:
        raise ImportError(
            f"torch_xla_donate supports torch_xla {supported_versions()}; found torch_xla {torch_xla_version}. "
            "It relies on internals that were compared for these versions only. Install one of them."
        )
    if _minor(torch_version) != _minor(torch_xla_version):
        raise ImportError(
            f"torch {torch_version} and torch_xla {torch_xla_version} do not belong together; "
            "install the same minor version of both."
        )
    if (_minor(built.torch), _minor(built.torch_xla)) != (_minor(torch_version), _minor(torch_xla_version)):
        raise ImportError(
            f"torch_xla_donate was built against torch {built.torch} and torch_xla {built.torch_xla}; "
            f"found torch {torch_version} and torch_xla {torch_xla_version}. {_REBUILD}"
        )
    if built.cxx11_abi != torch.compiled_with_cxx11_abi():
        raise ImportError(
            f"torch_xla_donate was built with the C++11 ABI {'on' if built.cxx11_abi else 'off'}, "
            f"this torch with the other. {_REBUILD}"
        )


def load() -> Any:
    """Checks versions, loads the extension module and installs the hooks; ImportError if anything does not fit."""
    try:
        torch_xla_version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"torch_xla_donate needs torch_xla ({supported_versions()}), which is not installed for {sys.executable}."
        ) from error
    check_versions(torch.__version__, torch_xla_version, build())

    import torch_xla  # noqa: F401  (the module to be hooked must be loaded)

    from torch_xla_donate import _C

    return _C


def xlac() -> Any:
    """torch_xla's extension module."""
    import _XLAC

    return _XLAC


def install_hooks() -> None:
    """Puts the hooks in place; does nothing if they are. ImportError says what does not fit."""
    from torch_xla_donate import _C

    try:
        _C.install(xlac().__file__)
    except RuntimeError as error:
        raise ImportError(
            f"torch_xla_donate could not hook torch_xla {importlib.metadata.version('torch_xla')}: {error}. "
            f"torch_xla is unchanged. Supported are its stock wheels of {supported_versions()}."
        ) from error


def uninstall_hooks() -> None:
    """Puts torch_xla back as it was. RuntimeError if somebody else has patched it since."""
    from torch_xla_donate import _C

    left = _C.uninstall()
    if left:
        raise RuntimeError(
            f"{left} slots of torch_xla hold another tool's pointer that was put there after ours; "
            "undo that tool's patch first, then call this again."
        )


_verified = False

# torch_xla's switches for compiling without a step are of the whole process. The threads of `torch_xla.launch`, one for
# each device, take turns; nobody waits for a device inside.
_compiling = threading.RLock()

# torch.fx patches torch.nn for the whole process while it traces, and fails where two threads do that at once. Not the
# lock above: a function is traced under that, and what autograd recomputes for it is traced on another thread.
_tracing_loops = threading.RLock()
_PATIENCE = 60.0  # seconds; longer than a trace takes


def verify_layouts() -> None:
    """Compares a probe tensor with the layouts relied on, once. ImportError (after unhooking) if one differs."""
    global _verified
    if _verified:
        return
    import torch_xla

    from torch_xla_donate import _C

    probe, number = _on_a_plain_thread(_probe, torch_xla.device())
    try:
        _C.verify_layouts(probe, number)
        _verify_executor()
    except RuntimeError as error:
        _C.uninstall()
        raise ImportError(
            f"this torch_xla is laid out differently than torch_xla_donate expects: {error}. "
            "The hooks have been taken out again; torch_xla is unchanged."
        ) from error
    _verified = True


def _on_a_plain_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns where no default device, trace or dispatch mode of this thread holds."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no thread
        with _disable_current_modes():
            run()
    return outcome.result()


def _probe(device: torch.device) -> tuple[torch.Tensor, int]:
    """A fresh tensor that the device has, and torch_xla's number of it."""
    # Integers: XLA_USE_BF16 and a default dtype change what a float is.
    probe = torch.zeros(3, dtype=torch.int32).to(device)
    # Uploads the probe and nothing else: other tensors' pending work stays pending.
    xlac()._xla_sync_multi([probe], [], True, True)
    return probe, xlac()._xla_get_tensor_id(probe)


def _verify_executor() -> None:
    from torch_xla_donate import _C

    # Other threads may turn a switch between the question and the look.
    for attempt in reversed(range(100)):
        try:
            _C.verify_executor(in_eager_mode(), xlac()._get_allow_execution())
            return
        except RuntimeError:
            if attempt == 0:
                raise


def buffer_pointer(tensor: torch.Tensor) -> int | None:
    """The address of a materialised tensor's memory; None where the platform does not tell (CPU does)."""
    try:
        return int(xlac()._unsafe_buffer_pointer(tensor))
    except RuntimeError:
        return None


def sharding_spec(tensor: torch.Tensor) -> str:
    """The tensor's sharding as XLA writes it; empty if it has none."""
    return str(xlac()._get_xla_sharding_spec(tensor))


def device_count() -> int:
    """How many devices there are, over all hosts."""
    return int(runtime().global_runtime_device_count())


def process_count() -> int:
    """How many processes run the program: as the runtime says, or torchrun, of which it knows nothing on the CPU."""
    return max(int(runtime().process_count()), _config.world_size())


def list_live_tensors() -> bool:
    """Makes torch_xla list the live tensors of the current device, which the hooks note; whether one is pending."""
    import torch_xla

    return any(xlac()._check_device_tensor_need_materialization(str(torch_xla.device())))


def auto_sharding() -> bool:
    """Whether XLA chooses shardings by itself, in which case torch_xla ignores every donor."""
    return bool(xlac()._xla_get_auto_sharding())


def ignores_donors() -> str:
    """The setting that makes torch_xla ignore every donor; empty if none does. The hooks are told, too."""
    from torch_xla_donate import _C

    if auto_sharding():
        setting = "auto-sharding (XLA_AUTO_SPMD=1 or xr.use_spmd(auto=True))"
    else:
        setting = next(iter(_config.ignoring_donors()), "")
    _C.set_switched_off(setting)
    return setting


def wait_for_devices() -> None:
    """Waits until the devices have computed what they were given."""
    xlac()._xla_wait_device_ops([])


def functions_of_a_step() -> tuple[Any, Any]:
    """torch_xla's functions that the hooks call at a step that may donate.

    The first sets the token that orders collectives within a step; with None it drops it. The second answers whether
    auto-sharding is on, which a program may switch on at any time.
    """
    return xlac()._set_all_reduce_token, xlac()._xla_get_auto_sharding


def graph_key(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What torch_xla's dynamo bridge compiles anew for, beyond what torch.compile guards: numbers, and shardings."""
    numbers = tuple(argument for argument in arguments if not isinstance(argument, torch.Tensor))
    return (numbers, *shardings(arguments))


def shardings(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """How the tensors among the arguments are sharded; empty where nothing is."""
    if not runtime().is_spmd():
        return ()
    tensors = [a for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "xla"]
    return (tuple(xlac()._get_xla_sharding_specs(tensors)),)


class ExtractedGraph(NamedTuple):
    """A graph that torch_xla's dynamo bridge has compiled.

    run: runs it.
    parts: in how many parts it runs, on the device or on the host.
    returned: the places of the arguments whose buffers its results hold.
    places: for each donor its number among the graph's parameters, and that of the output computed from it.
    """

    run: Callable[..., Any]
    parts: int
    returned: frozenset[int]
    places: list[tuple[int | None, int | None]]


def extract_graph(
    model: torch.fx.GraphModule, arguments: Sequence[Any], donors: Sequence[torch.Tensor]
) -> ExtractedGraph:
    """Lets torch_xla's dynamo bridge compile a graph, with these arguments as its donors.

    The hooks order the parameters so that XLA gives each donor to the output computed from it.
    """
    import torch_xla
    from torch_xla._dynamo import dynamo_bridge

    from torch_xla_donate import _C

    original: Any = dynamo_bridge.extract_graph_helper
    parts = 0
    place_of: dict[int, tuple[int | None, int | None]] = {}
    returned: set[int] = set()

    def extract_part(model: Any, cache: dict[Any, Any]) -> Any:
        nonlocal parts
        parts += 1
        torch_xla.sync(reset_scope=False)  # nothing may be pending that would run while the flags are set
        buffers = [_C.identity(tensor)[1] for tensor in model.xla_args if isinstance(tensor, torch.Tensor)]
        donated = donors if parts == 1 else []
        _C.order_parameters(donated)
        try:
            with donor_flags(donated):
                found = original(model, cache)
        finally:
            order = _C.take_order()
        if order:
            _match_by_buffer(found[5], buffers, [buffer for buffer, _ in order])
        place_of.update((buffer, (place, successor)) for place, (buffer, successor) in enumerate(order))
        return _without_arguments(found, model, cache)

    class Returns(dynamo_bridge.SpecialReturnHandler):  # type: ignore[misc]
        def __init__(self, inputs: Any, outputs: Any, updated: Sequence[bool], constants: Any) -> None:
            super().__init__(inputs, outputs, updated, constants)  # type: ignore[no-untyped-call]
            self._aliases = _take_by_buffer(self, updated)
            returned.update(_C.identity(inputs[place])[1] for place in self._aliases)
            places = [place for _, place in self.trace_outputs_pos_to_inputs_pos if place < len(inputs)]
            returned.update(_C.identity(inputs[place])[1] for place in places)

        def addDumbReturn(self, inputs: Any, outputs: Any) -> Any:
            aliases = [inputs[place].detach() for place in self._aliases]
            return super().addDumbReturn([*inputs, *aliases], outputs)  # type: ignore[no-untyped-call]

    torch_xla.sync(reset_scope=False)
    torch_xla.core.xla_model.wait_device_ops()
    given = [_C.identity(argument)[1] if isinstance(argument, torch.Tensor) else 0 for argument in arguments]
    with (
        replaced(dynamo_bridge, "extract_graph_helper", extract_part),
        replaced(dynamo_bridge, "SpecialReturnHandler", Returns),
    ):
        run = dynamo_bridge.extract_compiled_graph(model, tuple(arguments))
    if isinstance(run, torch.fx.GraphModule):  # its nodes are compiled parts, and operations left to the host
        called = [node for node in run.graph.nodes if node.op.startswith("call_")]
        parts = max(parts, sum(node.target is not operator.getitem for node in called))
    return ExtractedGraph(
        run,
        parts,
        frozenset(place for place, buffer in enumerate(given) if buffer in returned),
        [place_of.get(_C.identity(donor)[1], (None, None)) for donor in donors],
    )


def _match_by_buffer(matcher: Any, buffers: Sequence[int], order: Sequence[int]) -> None:
    """Makes the bridge's inputs those of the compiled graph, and arguments those that it has taken for constants.

    It looks for the tensor that first had a buffer, which is another one after a whole copy or a change of sharding;
    and it lists inputs that are results as they came, which the graph does not read.

    order: the buffers of the graph's parameters.
    """
    from torch_xla_donate import _C

    position = {buffer: i for i, buffer in reversed(list(enumerate(buffers))) if buffer}
    ids, values, arguments = matcher.graph_input_tensor_ids, matcher.graph_input_xla_values, matcher.arg_idxs
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        if value is not None and arguments[place] is None and _C.state(value) != "read_only":
            argument = position.get(_C.identity(value)[1])
            if argument is not None:
                arguments[place], values[place] = argument, None
        buffer = buffers[arguments[place]] if values[place] is None else _C.identity(values[place])[1]
        places.setdefault(buffer, place)
    assert places.keys() >= set(order), "the hooks have not seen the graph"
    read = [places[buffer] for buffer in order]
    matcher.graph_input_tensor_ids = [ids[place] for place in read]
    matcher.graph_input_xla_values = [values[place] for place in read]
    matcher.arg_idxs = [arguments[place] for place in read]


def _take_by_buffer(returns: Any, updated: Sequence[bool]) -> list[int]:
    """Has the bridge take results from the inputs that are those in other tensor objects.

    The executor does not compute such a result, and the bridge knows an input by its object alone: it would miss one.
    Gives the place of the input of each; after the inputs come their aliases.

    updated: whether the graph updates an input in place.
    """
    from torch_xla_donate import _C

    places, count = returns.trace_outputs_pos_to_inputs_pos, len(returns.trace_inputs)
    known = {out for out, _ in places}
    buffers = [0 if updated[place] else _C.identity(tensor)[1] for place, tensor in enumerate(returns.trace_inputs)]
    position = {buffer: place for place, buffer in reversed(list(enumerate(buffers))) if buffer}
    aliases: list[int] = []
    for out, tensor in enumerate(returns.deduped_trace_outputs):
        source = None if out in known else position.get(_C.identity(tensor)[1])
        if source is not None:
            places.append((out, count + len(aliases)))
            aliases.append(source)
    places.sort()
    return aliases


class _AnySharding:
    """Equal to every sharding.

    The bridge compares its first calls' shardings with those of the extraction, and extracts the graph anew if they
    differ, without our donors. An unsharded argument differs from itself then, as extraction has made it a replicated
    one. Whoever runs the graph has looked at the shardings already (`graph_key`).
    """

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _without_arguments(found: tuple[Any, ...], model: Any, cache: dict[Any, Any]) -> tuple[Any, ...]:
    """What extraction has found, without the tensors that it was made with: the bridge keeps them and needs none."""
    kept = list(found)
    kept[0] = _AnySharding()
    kept[1], kept[7] = (None,) * len(found[1]), [None] * len(found[7])
    returns = found[6]
    returns.trace_inputs = returns.trace_outputs = returns.deduped_trace_outputs = None
    model.xla_args = None
    scrubbed = tuple(kept)
    for key, value in cache.items():
        if value is found:
            cache[key] = scrubbed
    return scrubbed


def replaced(module: types.ModuleType, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """Another value for a name of one of torch_xla's Python modules, for as long as the context holds."""
    from torch_xla_donate._switches import Replaced

    return Replaced(_compiling, module, name, value)


def scan_loop(body: Callable[..., Any], init: list[torch.Tensor], xs: list[torch.Tensor], reverse: bool) -> Any:
    """torch_xla's loop over flat lists of tensors: the last carry and the stacked outputs of `body`."""
    from torch_xla.experimental import scan as host

    return host._scan_impl_flat(body, init, xs, reverse=reverse)


@contextlib.contextmanager
def nested_scans(loop: Callable[..., Any]) -> Iterator[None]:
    """torch_xla's scan, for as long as the context holds, works inside of a trace, too.

    torch_xla cannot trace its own loop: that makes placeholders and lowers the body, which the tensors of a trace do
    not have the data for. There `loop(body, init, xs, reverse)` is called in its place, and the body is traced on
    tensors outside of the trace that is under way.
    """
    from torch_xla.experimental import scan as host

    run, trace = host._scan_impl_flat, host.value_and_grad_partitioned

    def flat(fn: Any, init: Any, xs: Any, reverse: bool = False) -> Any:
        if any(map(is_traced, (*init, *xs))):
            return loop(fn, list(init), list(xs), reverse)
        return run(fn, init, xs, reverse=reverse)

    def partitioned(fn: Any, init: Any, xs: Any, *args: Any, **options: Any) -> Any:
        leaves, structure = pytree.tree_flatten((init, xs))
        if any(map(is_traced, leaves)):
            with _disable_current_modes():
                init, xs = pytree.tree_unflatten([_stand_in(leaf) for leaf in leaves], structure)
                return trace(fn, init, xs, *args, **options)
        # A thread that traces may wait for a backward pass: autograd's threads wait for their turn, but not for ever.
        in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        is_our_turn = _tracing_loops.acquire(timeout=_PATIENCE if in_backward else -1)
        try:
            return trace(fn, init, xs, *args, **options)
        finally:
            if is_our_turn:
                _tracing_loops.release()

    # Not `replaced`: the first thread to come enters this and the last to leave leaves it, so no lock may be held.
    host._scan_impl_flat, host.value_and_grad_partitioned = flat, partitioned
    try:
        yield
    finally:
        host._scan_impl_flat, host.value_and_grad_partitioned = run, trace


def scan_layers(scan: Callable[..., Any], layers: Sequence[Any], *args: Any, **options: Any) -> Any:
    """torch_xla's scan_layers, with another scan in it: in a copy, as other threads may be in the original."""
    from torch_xla.experimental import scan_layers as host

    original = host.scan_layers
    copied = types.FunctionType(
        original.__code__, {**vars(host), "scan": scan}, original.__name__, original.__defaults__, original.__closure__
    )
    copied.__kwdefaults__ = original.__kwdefaults__
    return copied(layers, *args, **options)


def is_traced(leaf: object) -> bool:
    """Whether a value stands for a tensor in a trace that is under way."""
    return isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter, Number)


def _stand_in(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="xla").requires_grad_(leaf.requires_grad)


def read_by_backward_scan(node: Any) -> Sequence[Any]:
    """What the backward pass of a scan reads; node is that of its result.

    torch_xla saves `init` and `xs` whole, next to the activations, and looks at them under SPMD alone, for their
    sharding. The activations have those arrays of `xs` among them that the backward pass needs.
    """
    saved: Sequence[Any] = getattr(node, "saved_tensors", ())
    if runtime().is_spmd() or not hasattr(node, "_saved_tensors_spec"):
        return saved
    activations: Sequence[Any] = pytree.tree_unflatten(saved, node._saved_tensors_spec)["activations"]
    return activations


def accumulate(
    step: Callable[..., Any],
    iterable_tensors: tuple[torch.Tensor, ...],
    model: torch.nn.Module,
    carried_tensors: tuple[torch.Tensor, ...],
) -> Any:
    """torch_xla's gradient_accumulation, with the carried tensors in their order.

    Raises ValueError if torch_xla's loop loses one of them, which it does if the step does not read it.
    """
    from torch_xla.experimental import gradient_accumulation as host

    result = host.gradient_accumulation(step, iterable_tensors, model, *carried_tensors)  # type: ignore[arg-type]
    if not carried_tensors:
        return result
    loss, *carried = result
    if "carried_tensors_start_idx - body_idx" in inspect.getsource(host._gradient_accumulation_impl):
        # The place of the k-th carried tensor is computed with the wrong sign, which counts from the end.
        carried = [carried[-index] for index in range(len(carried))]
    for index, tensor in enumerate(carried):
        if tensor is None and _is_known_by_another(carried_tensors[index]):
            raise ValueError(
                f"carried_tensors[{index}] shares its buffer with another tensor (as after a whole copy, b.copy_(t)), "
                "as which torch_xla knows it, so that its loop loses the new value. Pass a .clone() of it."
            )
        if tensor is None:
            raise ValueError(
                f"carried_tensors[{index}] is not read by the train step, and torch_xla loses its new "
                "value then. Use it in the step, or make it in the step and do not carry it."
            )
    return (loss, *carried)


def _is_known_by_another(tensor: torch.Tensor) -> bool:
    """Whether torch_xla takes what a tensor's buffer holds for the value of another one."""
    ids, _ = xlac()._get_tensors_xla_device_data_node([tensor])
    return list(ids) != [xlac()._xla_get_tensor_id(tensor)]


def same_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of a materialised tensor's buffer."""
    _, found = xlac()._get_tensors_xla_device_data_node([tensor])
    same: torch.Tensor = found[0]
    return same


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is pending, and will have a buffer of its own: torch_xla would let a clone share the tensor's."""
    copy = tensor.detach().clone()
    xlac()._xla_optimization_barrier_([copy])
    return copy


def give_own_buffer(tensor: torch.Tensor) -> None:
    """Lets a tensor that shares its buffer get one of its own at the next step; its value stays.

    No update in place: torch_xla donates the buffer of a tensor that is updated, whoever else holds it.
    """
    import torch_xla

    own = computed(tensor)
    torch_xla.sync()
    tensor.data.copy_(own)


def transfers() -> tuple[int, int]:
    """How often this process has read a tensor's value from the device, and this thread waited for one."""
    from torch_xla_donate import _C

    data = xlac()._xla_metric_data("TransferFromDeviceTime")
    return int(data[0]) if data is not None else 0, _C.barriers_passed()


def is_evicted(error: RuntimeError) -> bool:
    """Whether a graph was not found because torch_xla's cache of compiled graphs has dropped it."""
    return "kicked out of the LRU cache" in str(error)


def donor_flags(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Sets torch_xla's private donation flag on the tensors' buffers: for compiling a graph, never for running one.

    The flags are set on other tensors of the same buffers, so that they can be taken back whatever becomes of these.
    """
    from torch_xla_donate._switches import DonorFlags

    return DonorFlags(xlac()._get_tensors_xla_device_data_node(list(tensors))[1] if tensors else [])


@dataclasses.dataclass(frozen=True)
class CapturedFrame:
    """What torch.compile is compiling.

    Attributes:
        code: the frame's.
        returned: names of the graph's inputs that the frame returns as they are.
        around: expressions, as guards have them, for what else the frame returns or stores without computing it.
    """

    code: types.CodeType
    returned: frozenset[str]
    around: tuple[str, ...]

    def values_around(self) -> list[Any]:
        """Below a running frame of this code: the values of the expressions. Passes on what one of them raises."""
        if not self.around:
            return []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not _is_version_of(frame.f_code, self.code):
            frame = frame.f_back
        if frame is None:
            raise LookupError(f"no frame of {self.code.co_name} is running")
        from torch._dynamo import guards

        helpers: Any = getattr(guards, "_get_closure_vars", None)
        names = helpers() if helpers is not None else vars(guards)["CLOSURE_VARS"]  # torch 2.7
        scope = {**names, "L": frame.f_locals, "G": frame.f_globals}
        return [eval(expression, scope) for expression in self.around]


def _is_version_of(code: types.CodeType, original: types.CodeType) -> bool:
    """Whether torch.compile may have made the code out of the original."""
    return (code.co_filename, code.co_firstlineno, code.co_name) == (
        original.co_filename,
        original.co_firstlineno,
        original.co_name,
    )


def captured_frame(inputs: Iterable[str]) -> CapturedFrame | None:
    """Inside of a torch.compile backend: the frame that is being captured; None if it cannot be told.

    What a frame returns unchanged is no output of its graph: bytecode around the graph returns it. `inputs` are the
    names of the graph's; an argument that the graph does not read is none of them.
    """
    from torch._dynamo.variables.base import VariableTracker

    read = set(inputs)
    frame = sys._getframe(1)
    while frame.f_back is not None:
        owner: Any = frame.f_locals.get("self")
        if type(owner).__name__ == "OutputGraph":
            returned: set[str] = set()
            around: dict[str, None] = {}

            def note(variable: Any, returned: set[str] = returned, around: dict[str, None] = around) -> None:
                node = getattr(getattr(variable, "proxy", None), "node", None)
                if node is not None and node.op == "placeholder" and node.name in read:
                    returned.add(node.name)
                elif variable.source is not None:
                    around[variable.source.name()] = None

            try:
                VariableTracker.visit(note, owner.root_tx.stack)
                VariableTracker.visit(note, owner.side_effects.store_attr_mutations)
                return CapturedFrame(owner.root_tx.f_code, frozenset(returned), tuple(around))
            except (AttributeError, NotImplementedError):
                return None
        frame = frame.f_back
    return None


def wrapping_code() -> types.CodeType:
    """The code of the frame that torch.compile puts around a callable that has none of its own, or is torch's."""
    from torch._dynamo.external_utils import wrap_inline

    return wrap_inline(len).__code__


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module does more than its forward."""
    from torch.nn.modules import module as modules

    return bool(
        type(module).__call__ is not torch.nn.Module.__call__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def remove_module_hook(hook: Callable[..., Any]) -> None:
    """Takes a hook of all modules' forward out, without a handle: an interrupt can come before the handle is stored."""
    from torch.nn.modules import module as modules

    hooks = modules._global_forward_pre_hooks
    for key in [key for key, found in list(hooks.items()) if found == hook]:
        hooks.pop(key, None)


def runtime() -> Any:
    """torch_xla.runtime."""
    import torch_xla.runtime

    return torch_xla.runtime


def tracing() -> contextlib.AbstractContextManager[Any]:
    """Operations inside are recorded and do not run. What is pending runs first.

    The random seed is afterwards what it was before.
    """
    import torch_xla

    from torch_xla_donate._switches import Tracing

    seed = xlac()._xla_get_rng_seed()
    torch_xla.sync()
    torch_xla.core.xla_model.wait_device_ops()
    return Tracing(_compiling, seed)


def in_eager_mode() -> bool:
    """Whether torch_xla runs each operation at once."""
    return bool(xlac()._get_use_eager_mode())


def forget_pending() -> None:
    """Throws away everything on this device that has not run. Reading such a tensor is an error of torch_xla then."""
    import torch_xla

    xlac()._clear_pending_irs(str(torch_xla.device()))


def is_refused_execution(error: RuntimeError) -> bool:
    """Whether something was refused to run while `tracing`."""
    return "Unexpected execution" in str(error)


@contextlib.contextmanager
def graph_name(name: str) -> Iterator[None]:
    """The name of the HLO modules of graphs that are compiled inside."""
    saved = xlac()._get_current_graph_name()
    xlac()._set_current_graph_name(name)
    try:
        yield
    finally:
        xlac()._set_current_graph_name(saved)


def seed_buffer() -> int:
    """The buffer of the random seed that this step draws from.

    torch_xla finds the seed among a graph's inputs by an id, which it takes away itself where a scan draws.
    """
    from torch_xla_donate import _C

    ids, inputs = xlac()._get_tensors_xla_device_data_node([torch.rand(1, device="xla")])
    return int(_C.identity(inputs[ids.index(xlac()._get_seed_info_id())])[1])


class CompiledGraph(NamedTuple):
    """A graph that torch_xla has compiled and not run.

    hash: by which `run_graph` finds it; None if there is nothing to run.
    inputs: a tensor for each parameter.
    seeds: the parameters that are the random seed.
    successors: for each parameter the number of the output computed from it, if it is a donor.
    """

    hash: bytes | None
    inputs: list[torch.Tensor]
    seeds: list[int]
    successors: list[int | None]


def compile_graph(
    outputs: Sequence[torch.Tensor], donors: Sequence[torch.Tensor], seed_buffer: int | None = None
) -> CompiledGraph:
    """Compiles the pending graph of some tensors, without running it, donating the buffers given.

    The hooks order the parameters so that XLA gives each donor to the output computed from it.

    seed_buffer: that of the seed, where its id does not tell.
    """
    if not outputs:
        return CompiledGraph(None, [], [], [])
    from torch_xla_donate import _C
    from torch_xla_donate._switches import Compiling

    ids, inputs = xlac()._get_tensors_xla_device_data_node(list(outputs))
    donors = list({_C.identity(donor)[1]: donor for donor in reversed(donors)}.values())[::-1]  # each buffer once
    with Compiling(_compiling), donor_flags(donors):
        _C.order_parameters(donors)
        graph_hash = xlac()._get_graph_hash(list(outputs))
        xlac()._xla_warm_up_cache(list(outputs), [])
        order = _C.take_order()
    found = {_C.identity(tensor)[1]: (tensor_id, tensor) for tensor_id, tensor in zip(ids, inputs)}
    assert found.keys() == {buffer for buffer, _ in order}, "the hooks have not seen the graph"
    seed = xlac()._get_seed_info_id()
    seeds = [place for place, (buffer, _) in enumerate(order) if buffer == seed_buffer or found[buffer][0] == seed]
    inputs = [found[buffer][1] for buffer, _ in order]
    return CompiledGraph(graph_hash, inputs, seeds, [successor for _, successor in order])


def paired(donors: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Which donor goes to which output, as JAX has it: an output takes the next donor of its shape and dtype.

    Returns places in `donors` and in `outputs`, in the order of the latter; what is no tensor there takes nothing.
    """
    free: dict[Any, list[int]] = {}
    for place in reversed(range(len(donors))):
        free.setdefault((donors[place].shape, donors[place].dtype), []).append(place)
    tensors = [(place, output) for place, output in enumerate(outputs) if isinstance(output, torch.Tensor)]
    kinds = [(place, (output.shape, output.dtype)) for place, output in tensors]
    return [(free[kind].pop(), place) for place, kind in kinds if free.get(kind)]


def run_graph(graph_hash: bytes, inputs: list[Any], seed: int | None) -> list[torch.Tensor]:
    """Runs a graph of `compile_graph`. The random seed, if it has one, goes on as at the end of a step."""
    if seed is not None:
        import torch_xla.core.xla_model as xm

        device = str(inputs[seed].device)
        # What is pending has drawn its numbers from the base seed: the next are those from the running one.
        xm.set_rng_state(xlac()._xla_get_rng_seed(), device)
        inputs[seed] = xlac()._get_base_seed_as_tensor(device)
        xm.set_rng_state((1012031 + xlac()._xla_get_rng_seed() * 7012063) % 2**64, device)
    return list(xlac()._run_cached_graph(graph_hash, inputs))


def autocast_state() -> tuple[Any, ...]:
    """What torch.autocast does to operations on XLA tensors here."""
    enabled = torch.is_autocast_enabled("xla")
    return (enabled, torch.get_autocast_dtype("xla") if enabled else None)


def compilations() -> int:
    """How many graphs torch_xla has compiled in this process."""
    return int(xlac()._xla_counter_value("UncachedCompile") or 0)


def compile_seconds(count: int) -> float:
    """How long XLA took for the last so many compilations."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")  # type: ignore[no-untyped-call]
    return float(sum(nanoseconds for _, nanoseconds in data[2][-count:]) / 1e9) if data is not None else 0.0


def describe_graph(graph_hash: bytes) -> tuple[str, str]:
    """A graph of `compile_graph`: its optimised HLO, and what XLA says of its memory."""
    from torch_xla_donate import _C

    _C.inspect_next_run()
    try:
        xlac()._run_cached_graph(graph_hash, [])
    except RuntimeError:
        described = _C.take_inspected()
        if described is None:
            raise
        return described.text, described.memory
    finally:
        _C.take_inspected()
    raise AssertionError("unreachable: the hook stops the run")


def hlo_text(outputs: Sequence[torch.Tensor], donors: Sequence[torch.Tensor]) -> str:
    """HLO of the pending graph of some tensors, before optimisation, with the donors among its parameters."""
    from torch_xla_donate import _C

    if not outputs:
        return ""
    buffers = {_C.identity(tensor)[1] for tensor in donors}
    _, inputs = xlac()._get_tensors_xla_device_data_node(list(outputs))
    numbers = [number for number, tensor in enumerate(inputs) if _C.identity(tensor)[1] in buffers]
    text = str(xlac()._get_xla_tensors_hlo(list(outputs)))
    if not numbers:
        return text
    # torch_xla leaves the donors out of this text; the place is the one where XLA prints them.
    entries = ", ".join(f"({number}, {{}})" for number in numbers)
    return text.replace(", entry_computation_layout=", f", buffer_donor={{ {entries} }}, entry_computation_layout=", 1)


def is_computation(value: Any) -> bool:
    """Whether a value is a computation of torch_xla's builder."""
    return isinstance(value, xlac().XlaComputation)


def computation_text(computation: Any) -> str:
    """The HLO of a computation, as its module was given: with donors, aliases and names."""
    return str(xlac()._xla_computation_text(computation))


def call_computation(name: str, inputs: Sequence[torch.Tensor], computation: Any) -> list[torch.Tensor]:
    """The results of a computation, pending. torch_xla wants a namespace in an operation's name."""
    qualified = name if "::" in name else f"xla::{name}"
    return list(xlac()._xla_user_computation(qualified, list(inputs), computation))


def calling(computation: Any, parameters: Sequence[HloShape]) -> Any:
    """A computation that takes the arrays of these parameters one by one, and calls the one given with them.

    Raises RuntimeError if torch_xla's builder cannot take the computation in. Names without a dot end the process.
    """
    from torch_xla.core import xla_builder

    name = "call"
    builder = xla_builder.create_builder(name)  # type: ignore[no-untyped-call]
    numbers = itertools.count()

    def operand(shape: HloShape) -> Any:
        if shape.is_tuple:
            return xla_builder.Op.tuple([operand(element) for element in shape.elements], builder=builder)  # type: ignore[no-untyped-call]
        dynamic = [number in shape.dynamic for number in range(len(shape.dims))] if shape.dynamic else None
        array = xla_builder.mkshape(shape.dtype, shape.dims, dynamic)  # type: ignore[no-untyped-call]
        return xla_builder.mkparam(builder, next(numbers), array)  # type: ignore[no-untyped-call]

    operands = [operand(parameter) for parameter in parameters]
    caller = xla_builder.Op.call(computation, operands, builder=builder).build(name)  # type: ignore[no-untyped-call]
    computation_text(caller)  # reads the module that the builder has made, and so checks it
    return caller


def array_of(tensor: torch.Tensor) -> HloShape:
    """An XLA tensor's shape on its device."""
    shape = xlac()._xla_op_tensor_shape(tensor, "")
    return HloShape(shape["type"], tuple(shape["sizes"]))


def placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like the one given, without memory."""
    from torch_xla.core import xla_builder

    shape = tuple(tensor.shape)
    empty: torch.Tensor = xla_builder.create_placeholder_tensor(shape, tensor.dtype)  # type: ignore[no-untyped-call]
    return empty.requires_grad_(tensor.requires_grad)


@functools.cache
def jax() -> tuple[Any, Any]:
    """jax and torchax, imported as torch_xla has it done. ImportError says what is missing for call_jax."""
    try:
        from torch_xla._internal import jax_workarounds
    except ImportError:
        raise ImportError(
            f"call_jax needs torch_xla 2.8 or 2.9; found torch_xla {importlib.metadata.version('torch_xla')}."
        ) from None
    jax_workarounds.jax_import_guard()  # type: ignore[no-untyped-call]
    with jax_workarounds.jax_env_context():
        try:
            import jax
            import torchax  # by itself first: the error names what is missing
            import torchax.interop
            import torchax.ops.mappings
        except ImportError as error:
            raise ImportError(
                f"call_jax needs jax and torchax: {error}. Install what it was tested with, on Python 3.11 or newer: "
                "pip install jax==0.7.1 jaxlib==0.7.1 torchax==0.0.13"
            ) from error
    # Sets what would make JAX trace again if it were set later.
    jax_workarounds.maybe_get_jax(log=False)  # type: ignore[no-untyped-call]
    return jax, torchax


def call_jax(f: Callable[..., Any], args: Any, kwargs: Any, name: str | None, override_hash: Any) -> Any:
    """torch_xla's call_jax."""
    from torch_xla.core import xla_builder

    return xla_builder.call_jax(f, args, kwargs, name, override_hash)


def jit_donation(f: Any) -> tuple[Any, Any] | None:
    """The numbers and names of the arguments that a jitted function donates; None if they cannot be told untraced."""
    info = getattr(f, "_jit_info", None)
    return None if info is None else (info.donate_argnums, info.donate_argnames)


def jax_environment() -> contextlib.AbstractContextManager[None]:
    """What torch_xla has set while JAX traces."""
    from torch_xla._internal import jax_workarounds

    return jax_workarounds.jax_env_context()
