"""What became of the donations: the report, and the warning for those that were not usable."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch_xla_donate import _C, _hlo, _interrupts, _into, _outlook, _reasons
from torch_xla_donate._errors import DonationError, DonationWarning, warn
from torch_xla_donate._holders import UNKNOWN, holders_of

Outcome = Literal["donated", "unusable", "pending"]


@dataclasses.dataclass(frozen=True)
class Donor:
    """One marked buffer, or one that `auto_donate` has found.

    Attributes:
        name: of the leaf, such as ``['layer1'].weight``; several, joined by commas, for tied tensors; empty for a
            tensor that was donated by itself.
        where: ``file:line`` of the donation; empty for an automatic one.
        shape: sizes of the whole array, before any sharding.
        dtype: XLA's name of the element type, such as ``f32``.
        bytes: of the whole array.
        bytes_per_device: of what each device holds, which is what XLA compares; the same without SPMD.
        sharding: as XLA writes it, such as ``{devices=[4,1]0,1,2,3}``; empty without SPMD.
        device: such as ``CPU:0``.
        outcome: ``donated``, ``unusable`` or ``pending``.
        reason: why it is not donated; empty if it is.
        step: number of the step that read it, counted from 1 over steps that have donors; None while pending.
        output: number of the output that took the buffer over, in the step's HLO; None if none did or if unknown.
        crossed: whether that is another output than the one computed from the donor, so that its value moves; None if
            no output is computed from it, or if unknown.
        into_kept: whether the output named by ``into=`` took the buffer over; None without ``into=`` or if unknown.
        automatic: whether nobody has marked it, and `auto_donate` has found that nothing can read it any more.
        prediction: of a pending mark, if it was asked for: what the next step will do with it; ``unknown`` where that
            depends on a sharding which the compiler will choose; None if no pending work reads it.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    bytes_per_device: int
    sharding: str
    device: str
    outcome: Outcome
    reason: str
    step: int | None
    into_kept: bool | None
    automatic: bool
    prediction: _outlook.Prediction | None = None
    output: int | None = None
    crossed: bool | None = None

    @property
    def array(self) -> str:
        """Element type and shape, as XLA writes them: ``f32[8,4]``."""
        return f"{self.dtype}[{','.join(str(size) for size in self.shape)}]"


@dataclasses.dataclass(frozen=True)
class HeldInput:
    """An input that an output could have taken over, had nobody held it.

    Attributes:
        array: element type and shape, as XLA writes them: ``f32[8,4]``.
        bytes: of the whole array, before any sharding.
        device: such as ``CPU:0``.
        holder: who holds it, as far as Python can tell when the report is made: ``variable 'old' at train.py:12``,
            ``grad_fn of variable 'loss' at train.py:9``, ``attribute 'weight' of variable 'model' at train.py:5``; or
            ``unknown holder``, or ``work that stays pending``.
    """

    array: str
    bytes: int
    device: str
    holder: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a report.

    Attributes:
        number: counted from 1 over steps that have donors; None for a step without.
        donors: how many it had.
        crossed: how many of them went to another output than the one computed from them.
        copied_bytes: of the donated buffers that XLA copies before it writes over them; None if unknown, as the
            executable is gone or donated nothing.
    """

    number: int | None
    donors: int = 0
    crossed: int = 0
    copied_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class DonationReport:
    """Outcome of every donor of the last steps, oldest first. The first step with donors begins the report.

    ``bool(report)`` is True if each step offered donors, and each of them was donated. Marked donors are offered, and
    automatic ones that an output has taken over; nobody has asked for those that were of no use.

    Attributes:
        donors: read by a step.
        pending: marked, and not read by any step yet.
        auto_refusals: how many steps of the process `auto_donate` has left alone, by reason; empty if none.
        held: what `auto_donate` has left alone in the last step of each device, although an output could have taken it;
            none of a device whose last step ran without `auto_donate`.
        backward_threads: how many steps of the process, with marks or with `auto_donate`, followed a backward pass on
            autograd's own threads. Such a thread may still hold gradients, which are outputs then. To avoid that, run
            the backward pass under ``torch.autograd.set_multithreading_enabled(False)``, or in `compile`.
        errors: how often a hook of the package has failed in this process and the step went on without donation or
            without the check of `debug_nans`, by error; empty if none has. Please report them.
    """

    donors: tuple[Donor, ...]
    pending: tuple[Donor, ...]
    auto_refusals: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held: tuple[HeldInput, ...] = ()
    steps: tuple[Step, ...] = ()
    backward_threads: int = 0
    errors: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def crossed(self) -> int:
        """How many donors went to another output than the one computed from them."""
        return sum(step.crossed for step in self.steps)

    @property
    def copied_bytes(self) -> int:
        """Bytes of donated buffers that XLA copied before it wrote over them, as far as it is known."""
        return sum(step.copied_bytes or 0 for step in self.steps)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donors whose memory an output has taken over."""
        return sum(donor.bytes for donor in self.donors if donor.outcome == "donated")

    @property
    def reused_fraction(self) -> float:
        """`donated_bytes` as a fraction of the bytes offered, times the share of steps that had donors.

        So it falls when a loop loses its donation. 0.0 if no donor was offered.
        """
        offered = sum(donor.bytes for donor in self.offered)
        if not offered:
            return 0.0
        with_donors = sum(step.number is not None for step in self.steps)
        share = with_donors / len(self.steps) if self.steps else 1.0
        return self.donated_bytes / offered * share

    @property
    def offered(self) -> tuple[Donor, ...]:
        """The donors that count: all but the automatic ones that were of no use."""
        return tuple(donor for donor in self.donors if donor.outcome == "donated" or not donor.automatic)

    def __bool__(self) -> bool:
        return self.reused_fraction == 1.0

    def __str__(self) -> str:
        from torch_xla_donate import _tables

        return _tables.report(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for ``json.dumps``."""
        return {
            "donors": [dataclasses.asdict(donor) for donor in self.donors],
            "pending": [dataclasses.asdict(donor) for donor in self.pending],
            "donated_bytes": self.donated_bytes,
            "reused_fraction": self.reused_fraction,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "crossed": self.crossed,
            "copied_bytes": self.copied_bytes,
            "auto_refusals": dict(self.auto_refusals),
            "held": [dataclasses.asdict(held) for held in self.held],
            "backward_threads": self.backward_threads,
            "errors": dict(self.errors),
        }


def donation_report(*, steps: int | None = None, predict: bool = False) -> DonationReport:
    """The donors of the last steps with their outcome, and the marks that are pending.

    Waits for running steps until they have been handed to the device, which is when XLA takes the buffers; not for the
    device to compute them.

    Args:
        steps: how many steps to look back, at most and by default 8. Steps without donors count from the first step
            with donors on; reads (``print``, ``.item()``, ``.cpu()``) do not.
        predict: whether to tell, for each pending mark, what the next step will do with it, from the bytes per device
            of marks and outputs. Looks at all pending work, so no other thread may be computing meanwhile. Nothing is
            compiled or run. What is seen from outside (dlpack, numpy) is not known; XLA copies it then.

    Raises:
        ValueError: ``steps`` is not positive.
        DonationError: a donation made with ``strict=True`` was unusable and has not been told before.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more.")
    _C.wait_for_steps()
    _into.resolve_pairs(wait=True)
    found = _last_steps(min(steps or _KEPT, _KEPT))
    donors: list[Donor] = []
    summary: list[Step] = []
    for step in found:
        if step is None:
            summary.append(Step(None))
            continue
        facts = _facts(step)
        own = [_donor(raw, step, facts=facts) for raw in step["donors"]]
        crossed = sum(bool(donor.crossed) for donor in own)
        summary.append(Step(step["number"], len(own), crossed, None if facts is None else facts.copied_bytes))
        donors += own
    marks = _C.pending()
    outlook = _outlook.Outlook() if predict and marks else None
    pending = [_donor(raw, None, outlook) for raw in marks]
    tell(everywhere=True)
    left_alone = _C.auto_held()
    holders = holders_of([raw.buffer for raw in left_alone if raw.by_tensor and raw.buffer])
    held = tuple(
        HeldInput(
            raw.array,
            raw.bytes,
            raw.device,
            holders.get(raw.buffer, UNKNOWN) if raw.by_tensor else "work that stays pending",
        )
        for raw in left_alone
    )
    return DonationReport(
        tuple(donors),
        tuple(pending),
        {_reasons.sentence(reason): count for reason, count in _C.auto_refusals()},
        held,
        tuple(summary),
        _C.backward_threads(),
        _C.hook_errors(),
    )


_KEPT = 8


def _last_steps(count: int) -> list[Mapping[str, Any] | None]:
    """The last steps, oldest first, from the first one with donors on; None stands for a step without donors."""
    with_donors = sorted(_C.steps(), key=lambda step: step["number"])  # they end in any order
    found: list[Mapping[str, Any] | None] = []
    for step, after in zip(with_donors, [*with_donors[1:], None]):
        plain_after = (_C.plain_steps() if after is None else after["plain_before"]) - step["plain_before"]
        found += [step, *[None] * min(plain_after, count)]
    return found[-count:]


class _Facts(NamedTuple):
    """What the executable of a step says: the output in each parameter's buffer, and the bytes copied beforehand."""

    output_of: Mapping[int, int]
    copied_bytes: int


_known_facts: dict[str, _Facts] = {}


def _facts(step: Mapping[str, Any]) -> _Facts | None:
    """The facts of a step's graph; None if they are not known. Reading them takes time in proportion to the HLO."""
    graph = step["graph"]
    if graph not in _known_facts:
        text = _C.graph_text(graph) if graph else None
        if text is None:
            return None
        module = _hlo.parse(text)
        wrapped = len(module.parameters) == 1 and module.parameters[0].is_tuple

        def number(parameter: int, index: Sequence[int]) -> int:
            return index[0] if wrapped else parameter

        output_of = {
            number(alias.parameter_number, alias.parameter_index): alias.output_index[0] if alias.output_index else 0
            for alias in module.aliases
        }
        copied = sum(size for parameter, size in _hlo.copied_parameters(text) if parameter in output_of)
        if len(_known_facts) >= _KEPT_FACTS:
            _known_facts.pop(next(iter(_known_facts)))
        _known_facts[graph] = _Facts(output_of, copied)
    return _known_facts[graph]


_KEPT_FACTS = 64


def _donor(
    raw: Mapping[str, Any],
    step: Mapping[str, Any] | None,
    outlook: _outlook.Outlook | None = None,
    facts: _Facts | None = None,
) -> Donor:
    kept = [_into.kept(names, leaf, step["graph"]) for names, leaf in raw["holders"]] if step is not None else []
    dtype, _, sizes = raw["shape"].rstrip("]").partition("[")
    prediction: _outlook.Prediction | None = None
    if step is None:
        outcome, (prediction, reason) = "pending", _expect(raw, outlook)
    elif raw["outcome"] == "donated":
        outcome, reason = "donated", ""
    else:
        outcome, reason = "unusable", _reasons.sentence(raw["reason"]) or explain(raw, step)
    output = facts.output_of.get(raw["parameter"]) if facts is not None and outcome == "donated" else None
    return Donor(
        name=raw["name"],
        where=raw["where"],
        shape=tuple(int(size) for size in sizes.split(",") if size),
        dtype=dtype,
        bytes=raw["bytes"],
        bytes_per_device=raw["bytes_per_device"],
        sharding=_split(raw["array"])[1],
        device=raw["device"],
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        step=None if step is None else step["number"],
        into_kept=next((value for value in kept if value is not None), None),
        automatic=raw["automatic"],
        prediction=prediction,
        output=output,
        crossed=None if output is None or raw["successor"] is None else output != raw["successor"],
    )


def _expect(raw: Mapping[str, Any], outlook: _outlook.Outlook | None) -> tuple[_outlook.Prediction | None, str]:
    """The prediction for a pending mark, and its reason."""
    unread = "no step has read it yet"
    if outlook is None:
        return None, unread
    prediction, why = outlook.of(raw)
    if prediction == "donated":
        return prediction, f"{unread}; the next one will donate it"
    if prediction == "unusable":
        return prediction, f"{unread}; the next one will not use it: {why or explain(raw, outlook.as_step())}"
    return prediction, f"{unread}; {why}"


def explain(raw: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """Why XLA did not use a donor that was in its donor set.

    XLA gives a donor to an output of the same bytes on each device, whatever its dtype or shape (measured on 2.9.0), so
    the outputs' sizes tell most of it.
    """
    dynamic = next((text.partition("{")[0] for text in step["outputs"] if "<=" in text), "")
    if dynamic:
        return f"an output has a size that only the device knows, {dynamic}, and XLA aliases nothing in such a graph"
    outputs = [(text, _C.bytes_per_device(text)) for text in step["outputs"] if text]
    if not outputs:
        return "XLA did not use it; the step's outputs are gone, so their sizes are not known"
    size = raw["bytes_per_device"]
    each = " on each device" if _split(raw["array"])[1] else ""
    fitting = sum(bytes_ == size for _, bytes_ in outputs)
    if not fitting:
        alike = [text for text, _ in outputs if _C.bytes_per_device(_split(text)[0]) == raw["bytes"]]
        if alike and each:
            return _differs_per_device(raw, alike[0], len(outputs) == 1)
        sizes = Counter(bytes_ for _, bytes_ in outputs if bytes_ is not None)
        shown = ", ".join(f"{count} of {bytes_} bytes" for bytes_, count in sorted(sizes.items())[:4])
        return (
            f"no output of the step has its size of {size} bytes{each} "
            f"(outputs: {shown}{', ...' if len(sizes) > 4 else ''})"
        )
    rivals = sum(other["bytes_per_device"] == size for other in step["donors"])
    if rivals > fitting:
        outputs_of_size = f"{fitting} output{'s' if fitting > 1 else ''}"
        return f"more donors than outputs of its size: {rivals} donors and {outputs_of_size} of {size} bytes{each}"
    return (
        f"outputs of its size of {size} bytes{each} went to other inputs (updated in place, they are donated by "
        "torch_xla itself), or the memory is seen from outside (dlpack, numpy)"
    )


def _differs_per_device(raw: Mapping[str, Any], output: str, alone: bool) -> str:
    _, donor_sharding = _split(raw["array"])
    array, sharding = _split(output)
    text = (
        f"an output has its size of {raw['bytes']} bytes, but not per device: the donor, sharded {donor_sharding}, "
        f"takes {raw['bytes_per_device']} bytes on each, the output {array}, sharded {sharding}, "
        f"{_C.bytes_per_device(output)}; "
    )
    if alone and sharding == "{replicated}" and not _C.is_even(raw["array"]):
        return (
            f"{text}XLA does not shard the only output of a step if the devices do not divide it evenly: pad the array"
        )
    return f"{text}shard donor and output alike"


def _split(array: str) -> tuple[str, str]:
    """Array and sharding of 'f32[8,4]{1,0} sharding={...}'."""
    whole, _, sharding = array.partition(" sharding=")
    return whole.partition("{")[0], sharding


class _Postponed(threading.local):
    depth = 0


_postponed = _Postponed()
_interrupts.restore(_postponed, "depth")


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Steps of this thread tell nothing inside: where an exception at the end of a sync would be in the way."""
    _postponed.depth += 1
    try:
        yield
    finally:
        _postponed.depth -= 1


def is_postponed() -> bool:
    """Whether `later` holds on this thread."""
    return _postponed.depth > 0


_warned_sites: set[str] = set()


def warn_once(message: str, where: str) -> None:
    """Warns, unless something has been told of this place in the code before."""
    if where not in _warned_sites:
        _warned_sites.add(where)
        warn(message, where)


def tell(*, everywhere: bool = False) -> None:
    """Warns of unusable donations, once for each place in the code; raises where a donation was strict.

    The hooks call this at the end of a step, if there is something to tell. Inside of `later` it waits.

    Args:
        everywhere: of all devices. Else of the one that this thread has stepped last: `torch_xla.launch` runs a thread
            for each device, and each shall get its own errors.
    """
    if is_postponed():
        return
    failures: list[str] = []
    raised: list[BaseException] = []
    for step in _C.take_notices(everywhere):
        by_site: dict[str, list[Mapping[str, Any]]] = {}
        for raw in step["donors"]:
            if raw["outcome"] == "unusable" and not raw["told"]:
                by_site.setdefault(raw["where"], []).append(raw)
        for where, unusable in by_site.items():
            message = _unusable_text(where, unusable, step)
            if any(raw["strict"] for raw in unusable):
                failures.append(message)
            else:
                try:
                    warn_once(message, where)
                except BaseException as error:  # a filter that makes errors of warnings; the others must be told, too
                    raised.append(error)
    refused = DonationError("\n".join(failures)) if failures else None
    # What is no warning has come from elsewhere, such as a signal's handler, and nobody else will raise it.
    foreign = next((error for error in raised if not isinstance(error, DonationWarning)), None)
    if foreign is not None:
        raise foreign from refused or foreign.__cause__
    if refused is not None:
        raise refused from next(iter(raised), None)
    if raised:
        raise raised[0]


@atexit.register
def _tell_at_exit() -> None:
    # The last step of a program has no next one at whose end it could be told.
    _C.wait_for_steps()
    try:
        tell(everywhere=True)
    except (DonationError, DonationWarning) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


_SHOWN = 5


def _unusable_text(where: str, unusable: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> str:
    donors = [_donor(raw, step) for raw in unusable]
    arrays = ", ".join(donor.array for donor in donors[:_SHOWN])
    more = f", and {len(donors) - _SHOWN} more" if len(donors) > _SHOWN else ""
    lines = [f"Some donated buffers were not usable: {arrays}{more} (donated at {where}, step {step['number']})."]
    for donor in donors[:_SHOWN]:
        lines.append(f"  {donor.array}{f' {donor.name}' if donor.name else ''}: {donor.reason}.")
    lines.append("  They stay readable. See docs/unusable.md.")
    return "\n".join(lines)
