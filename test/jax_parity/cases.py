"""The behaviours: JAX's own donation tests, and what its page on donation says, as programs for either side.

The list is that of the tests whose names contain "donat" in JAX's repository at commit cec06d116c05 (Apache-2.0); the
programs are written for this table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sides import DEVICES, Side

Observations = Mapping[str, Any]


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        behaviour: what is looked at.
        sources: JAX's tests, as file::test, or its page.
        run: gives the observations of a side; None where there is nothing to run here.
        reason: why the two differ; empty if they must not.
        spmd: whether it needs several devices.
    """

    behaviour: str
    sources: tuple[str, ...]
    run: Callable[[Side], Observations] | None
    reason: str = ""
    spmd: bool = False


CASES: list[Case] = []
PAGE = "buffer_donation.md"


def case(behaviour: str, source: str, reason: str = "", **options: Any) -> Callable[..., Any]:
    def register(run: Callable[[Side], Observations]) -> Callable[[Side], Observations]:
        CASES.append(Case(behaviour, (source,), run, reason, **options))
        return run

    return register


def nothing_here(behaviour: str, reason: str, *sources: str) -> None:
    CASES.append(Case(behaviour, sources, None, reason))


def add(x: Any, y: Any) -> Any:
    return x + y


BY_NUMBER_AND_NAME = ({"donate_argnums": (0, 1)}, {"donate_argnames": ("z", "y")})

# --- The page on buffer donation, and what follows from it ---


@case("the output takes the place of the argument named by number", PAGE)
def _(side: Side) -> Observations:
    return side.donate(add, side.array(2, 3), side.array(2, 3), donate_argnums=(1,))


@case("every array of a donated list is donated", PAGE)
def _(side: Side) -> Observations:
    return side.donate(lambda xs: [x + 1 for x in xs], [side.array(2, 3), side.array(3, 4)], donate_argnums=0)


@case("an operation on a donated array, or reading it, is an error", PAGE)
def _(side: Side) -> Observations:
    x, y = side.array(2, 3), side.array(2, 3)
    side.compile(add, donate_argnums=1)(x, y)
    return {"operation": side.error(lambda: y + 1), "read": side.error(lambda: side.to_numpy(y))}


@case(
    "calling the function again with a donated array is an error",
    PAGE,
    "JAX's fast path raises what its runtime says; here it is a `DonatedBufferError`, a `RuntimeError`, as everywhere",
)
def _(side: Side) -> Observations:
    x, y = side.array(2, 3), side.array(2, 3)
    f = side.compile(add, donate_argnums=1)
    f(x, y)
    return {"error": side.error(lambda: f(x, y)), "x deleted": side.gone(x)}


@case("with more donors than outputs one is used", PAGE)
def _(side: Side) -> Observations:
    x, y = side.array(2, 3), side.array(2, 3)
    out = side.compile(add, donate_argnums=(0, 1))(x, y)
    side.settle()
    return {"number deleted": sum(side.gone(x, y)), "value": side.values(out)}


@case("a donor of another shape than the output stays", PAGE)
def _(side: Side) -> Observations:
    x, y = side.array(2, 3), side.array(1, 3)
    return {**side.donate(add, x, y, donate_argnums=1), "y": side.values(y)}


@case(
    "an output of another dtype or shape with as many bytes",
    PAGE,
    "JAX pairs donors and outputs of the same shape and dtype before it compiles; torch_xla leaves it to XLA, which "
    "needs the same bytes only",
)
def _(side: Side) -> Observations:
    def f(x: Any, y: Any) -> Any:
        return side.cast(x, "int32") + 1, (y * 2).reshape(2, 3)

    return side.donate(f, side.array(6), side.array(6), donate_argnums=(0, 1))


@case("shape and dtype of a donated array stay readable", PAGE)
def _(side: Side) -> Observations:
    x = side.array(2, 3)
    side.compile(lambda x: x + 1, donate_argnums=0)(x)
    return {"deleted": side.gone(x), "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}


@case(
    "a donated argument that the function returns as it is",
    PAGE,
    "torch returns the very tensor, which has to stay usable; JAX returns another array in the old memory",
)
def _(side: Side) -> Observations:
    return side.donate(lambda x: (x, x + 1), side.array(3), donate_argnums=0)


@case(
    "a donated argument that the function does not read",
    PAGE,
    "JAX prunes it before it looks at donors; here the first unusable donation of a line warns, and `strict=True` "
    "raises each time",
)
def _(side: Side) -> Observations:
    x, y = side.array(3), side.array(3)
    out = side.compile(lambda x, y: y + 1, donate_argnums=0)(x, y)
    side.settle()
    return {"deleted": side.gone(x, y), "value": side.values(out)}


@case(
    "one array in two donated places",
    PAGE,
    "tied weights are common in torch; there is one donor with both names",
)
def _(side: Side) -> Observations:
    x = side.array(3)
    f = side.compile(lambda x, y: x + y * 2, donate_argnums=(0, 1))
    return {"error": side.error(lambda: f(x, x)), "deleted": side.gone(x)}


@case(
    "the warning comes again for another shape",
    PAGE,
    "JAX warns once for each compilation; here once for each line that donates",
)
def _(side: Side) -> Observations:
    f = side.compile(lambda x: x.sum(), donate_argnums=0)
    for size in (3, 3, 4):
        f(side.array(size))
        side.settle()
    return {}


@case("a function that raises while it is traced donates nothing", PAGE)
def _(side: Side) -> Observations:
    def broken(x: Any) -> Any:
        raise KeyError("broken")

    x = side.array(3)
    error = side.error(lambda: side.compile(broken, donate_argnums=0)(x))
    return {"error": error, "deleted": side.gone(x), "value": side.values(x)}


@case("numbers out of range and unknown names", PAGE)
def _(side: Side) -> Observations:
    options = ({"donate_argnums": 2}, {"donate_argnums": -3}, {"donate_argnames": "z"}, {"donate_argnums": "x"})
    return {"errors": [side.error(lambda o=o: side.compile(add, **o)) for o in options]}


@case(
    "a negative number",
    PAGE,
    "JAX accepts it and donates nothing; here it counts from the end, as JAX's own `static_argnums` does",
)
def _(side: Side) -> Observations:
    x, y = side.array(3), side.array(3)
    side.compile(add, donate_argnums=-1)(x, y)
    return {"deleted": side.gone(x, y)}


@case(
    "a number beyond the arguments of a call, for a function of any number of arguments",
    PAGE,
    "JAX passes over it; here it is an error",
)
def _(side: Side) -> Observations:
    f = side.compile(lambda *args: [x + 1 for x in args], donate_argnums=2)
    return {"error": side.error(lambda: f(side.array(3), side.array(3)))}


@case(
    "a negative number, for a function of any number of arguments",
    PAGE,
    "JAX passes over it; here it counts from the end of the call's arguments",
)
def _(side: Side) -> Observations:
    x, y = side.array(3), side.array(4)
    side.compile(lambda *args: [x + 1 for x in args], donate_argnums=-1)(x, y)
    return {"deleted": side.gone(x, y)}


@case("an object that is not a pytree", PAGE)
def _(side: Side) -> Observations:
    class Opaque:
        array = side.array(3)

    f = side.compile(lambda opaque: opaque.array + 1, donate_argnums=0)
    return {"error": side.error(lambda: f(Opaque()))}


@case("a static argument that has no hash", PAGE)
def _(side: Side) -> Observations:
    f = side.compile(lambda x, n: x * n[0], donate_argnums=0, static_argnums=1)
    return {"error": side.error(lambda: f(side.array(3), [2]))}


@case(
    "an array made of a number on the host",
    PAGE,
    "torch_xla has one buffer for all 0-d tensors of this value from the host; destroying it would destroy them all",
)
def _(side: Side) -> Observations:
    x = side.torch.tensor(42.0, device="xla") if side.name == "ours" else side.jax.numpy.array(42.0)
    out = side.compile(lambda x: x + 1, donate_argnums=0)(x)
    side.settle()
    return {"deleted": side.gone(x), "value": side.values(out)}


# --- api_test ---


@case("names for a callable whose signature cannot be found", "api_test::test_donate_argnames_signature_fail")
def _(side: Side) -> Observations:
    class NoSignature:
        @property
        def __signature__(self) -> Any:
            raise TypeError("none")

        def __call__(self, *args: Any) -> Any:
            return args[0] + 1

    x = side.array(4)
    error = side.error(lambda: side.compile(NoSignature(), donate_argnames="a")(x))
    side.compile(NoSignature(), donate_argnums=0)(x)
    return {"names": error, "deleted by number": side.gone(x)}


@case("donors that fit no output", "api_test::test_jit_donate_warning_raised")
def _(side: Side) -> Observations:
    x, y = side.array(2), side.array(2, dtype="int32")

    by_number = side.compile(lambda x, y: x.sum() + y.sum(), donate_argnums=(0, 1))(x, y)
    side.settle()
    by_name = side.compile(lambda x, y: x.sum() + y.sum(), donate_argnames=("x", "y"))(x, y)
    side.settle()
    return {"deleted": side.gone(x, y), "values": side.values(by_number, by_name)}


@case("a 0-d array", "api_test::test_jit_donate_invalidates_input")
def _(side: Side) -> Observations:
    options = ({"donate_argnums": 0}, {"donate_argnames": "x"})
    return {"each": [side.donate(lambda x: x + x - x, side.array(), **one) for one in options]}


@case("static arguments before donated ones", "api_test::test_jit_donate_static_argnums")
def _(side: Side) -> Observations:
    given, out = [], []
    for options in ({"donate_argnums": (2, 3)}, {"donate_argnames": ("c", "d")}):
        f = side.compile(lambda a, b, c, d: (a + b + c, a + b + d), static_argnums=(0, 1), **options)
        given += [side.array(2, value=2.0), side.array(4)]
        out.append(f(1, 2, *given[-2:]))
    return {"deleted": side.gone(given), "values": side.values(out)}


@case(
    "static arguments by number, donated ones by name and given by keyword",
    "api_test::test_jit_donate_argnames_kwargs_static_argnums",
)
def _(side: Side) -> Observations:
    c, d, e = side.array(2, value=2.0), side.array(4), side.array(4, value=3.0)
    f = side.compile(
        lambda a, b, c, d, e: (a + b + c, a + b + d, a + b + e),
        static_argnums=(0, 1),
        donate_argnames=("d", "e"),
    )
    out = f(1, 2, c, d=d, e=e)
    return {"c, d, e deleted": side.gone(c, d, e), "values": side.values(out)}


@case(
    "an array of a weak type",
    "api_test::test_jit_donate_weak_type",
    "torch has no weak types: the cast does nothing, and an argument that is returned as it is stays",
)
def _(side: Side) -> Observations:
    x = side.array(3, dtype="int32") if side.name == "ours" else side.jax.numpy.broadcast_to(2, (3,))
    side.compile(lambda x: side.cast(x, "int32"), donate_argnums=0)(x)
    return {"deleted": side.gone(x)}


@case("numbers and names together mean their union", "api_test::test_specify_donate_argnums_and_argnames")
def _(side: Side) -> Observations:
    x, named = side.array(2, 5, value=4.0), {"j": side.array(2, 5, value=2.0), "k": side.array(2, 5)}
    options = {"donate_argnums": 0, "donate_argnames": ("j", "k")}
    return side.donate(lambda i, j, k: (i * 2, j * 2, k * 2), x, named=named, **options)


@case("donated by name, given by position", "api_test::test_donate_argnames_with_args")
def _(side: Side) -> Observations:
    return side.donate(lambda inp: inp * 2, side.array(2, 5), donate_argnames="inp")


@case("donated by number, given by keyword", "api_test::test_donate_argnums_with_kwargs")
def _(side: Side) -> Observations:
    return side.donate(lambda inp: inp * 2, named={"inp": side.array(2, 5)}, donate_argnums=0)


@case("the lowered function shows which leaves are donated", "api_test::test_donate_args_info_aot")
def _(side: Side) -> Observations:
    def f(x: Any, y: Any) -> Any:
        return side.map(lambda leaf: leaf * 2, x), y * 2

    x, y = {"A": side.array(2), "B": side.array(3)}, side.array(4)
    flags = [side.flags(side.compile(f, donate_argnums=number).lower(x, y)) for number in (0, 1)]
    return {"donated, 0": flags[0], "donated, 1": flags[1], "deleted": side.gone(x, y)}


@case(
    "one array passed donated and not donated",
    "api_test::test_double_donation",
    "JAX's runtime notices when the step is started; here the call is refused before anything runs, and names both "
    "arguments",
)
def _(side: Side) -> Observations:
    x = side.array(10)
    f = side.compile(add, donate_argnums=(0,))
    return {"error": side.error(lambda: f(x, x)), "deleted": side.gone(x)}


@case("arguments given by keyword, in the lowered function", "api_test::test_dict_donation")
def _(side: Side) -> Observations:
    z, y, x = ({name: side.array(2)} for name in "cba")
    kwargs = {"x": x, "y": y, "z": z}
    compiled = [side.compile(lambda z, y, x: (z, y, x), **options) for options in BY_NUMBER_AND_NAME]
    return {"donated x, y, z": [side.flags(f.lower(**kwargs)) for f in compiled]}


@case("one given by position, two by keyword, in the lowered function", "api_test::test_dict_donation_args_kwargs")
def _(side: Side) -> Observations:
    z, y, x = ({name: side.array(2)} for name in "cba")
    compiled = [side.compile(lambda z, y, x: (z, y, x), **options) for options in BY_NUMBER_AND_NAME]
    return {"donated z, x, y": [side.flags(f.lower(z, x=x, y=y)) for f in compiled]}


@case("an argument both static and donated", "api_test::test_intersecting_static_and_donate_argnames")
def _(side: Side) -> Observations:
    return {"error": side.error(lambda: side.compile(lambda x: x, static_argnames="x", donate_argnames="x"))}


@case("a compiled function inside another one donates nothing", "api_test::test_jit_nested_donate_ignored")
def _(side: Side) -> Observations:
    return side.donate(lambda x: side.compile(lambda y: y * y, donate_argnums=0)(x), side.array(3, value=3.0))


@case("the lowered function knows the donated number", "api_test::test_jit_lower_donate_argnums_available")
def _(side: Side) -> Observations:
    lowered = side.compile(lambda *args: args[0] + 4.0, donate_argnums=(0,)).lower(side.array(2), side.array(2))
    return {"lowered": side.flags(lowered), "compiled": side.flags(lowered.compile())}


@case(
    "a donated array is put on a device",
    "api_test::test_device_put_on_single_device_donated_buffer_fails",
)
def _(side: Side) -> Observations:
    x = side.array(10)
    side.compile(lambda x: x * 2, donate_argnums=0)(x)
    return {"error": side.error(lambda: side.copied(x))}


@case(
    "a donated, split array is put on its devices again",
    "api_test::test_device_put_on_multi_device_donated_buffer_fails",
    spmd=True,
)
def _(side: Side) -> Observations:
    x = side.split(side.array(DEVICES))
    side.compile(lambda x: side.split(x * 2), donate_argnums=0)(x)
    return {"deleted": side.gone(x), "error": side.error(lambda: side.copied(x))}


nothing_here(
    "donation by `pmap`",
    "torch_xla has no `pmap`; the rows of pjit_test are about arrays on several devices",
    "api_test::test_pmap_donate_argnums_invalidates_input",
    "api_test::test_pmap_nested_donate_ignored",
    "debug_nans_test::testDebugNansPmapWithDonation",
)

# --- api_util_test ---


@case("which leaves the numbers mean, and no keyword", "api_util_test::test_donation_vector")
def _(side: Side) -> Observations:
    first, second = ({name: side.array(2) for name in names} for names in ("ab", "cd"))

    def f(x: Any, y: Any, z: Any, **others: Any) -> Any:
        return side.map(lambda leaf: leaf + 1, (x, y, z, others))

    def flags(numbers: tuple[int, ...], **others: Any) -> str:
        found = side.flags(side.compile(f, donate_argnums=numbers).lower(first, second, side.array(2), **others))
        return "".join("x" if flag else "." for flag in found)

    numbers = [(), (0,), (1,), (2,), (0, 1), (2, 0), (1, 2), (2, 1, 0)]
    return {"donated": [flags(n) for n in numbers], "with a=": [flags(n, a=side.array(2)) for n in numbers]}


@case("numbers that are both static and donated", "api_util_test::test_rebase_donate_argnums_rejects_overlapping")
def _(side: Side) -> Observations:
    pairs = [((0,), (0,)), ((0, 1), (1, 2)), ((0, 1, 2), (0, 1, 2))]

    def error(donate: Any, static: Any) -> str:
        return side.error(lambda: side.compile(lambda a, b, c: a, donate_argnums=donate, static_argnums=static))

    return {"errors": [error(*pair) for pair in pairs]}


@case("static arguments count, and a number may come twice", "api_util_test::test_rebase_donate_argnums")
def _(side: Side) -> Observations:
    def deleted(donate: tuple[int, ...], static: tuple[int, ...]) -> list[bool]:
        given = [i + 1 if i in static else side.array(2, value=i) for i in range(4)]

        def f(a: Any, b: Any, c: Any, d: Any) -> Any:
            return [x + 1 for x in (a, b, c, d)]

        side.compile(f, donate_argnums=donate, static_argnums=static)(*given)
        return side.gone([x for i, x in enumerate(given) if i not in static])

    pairs = [((), ()), ((), (1, 2, 3)), ((0,), (2, 3)), ((0, 1), (2, 3)), ((3, 2), (1, 0)), ((3, 3, 3), (0, 1))]
    return {"deleted, without the static ones": [deleted(*pair) for pair in pairs]}


# --- array_test, checkify_test, debugging_primitives_test, debug_nans_test ---


@case(
    "memory that the host still sees",
    "array_test::test_buffer_protocol_donation",
    "XLA copies on both sides; JAX does not report it",
)
def _(side: Side) -> Observations:
    x = side.array(64, 64)
    seen = side.seen_from_outside(x)
    out = side.compile(lambda x: x + 1, donate_argnums=0)(x)
    side.settle()
    return {"seen": seen[0, 0].item(), "deleted": side.gone(x), "value": side.values(out)}


@case("an array that is whole on every device", "array_test::test_fully_replicated_donated_array_is_deleted", spmd=True)
def _(side: Side) -> Observations:
    return side.donate(lambda x: side.split(x * 2, None), side.split(side.array(16), None), donate_argnums=0)


@case(
    "a result that is a donated argument is donated again",
    "checkify_test::test_checify_donation_no_forwarding",
    "as for every argument that is returned as it is",
)
def _(side: Side) -> Observations:
    f = side.compile(lambda x: x, donate_argnums=0)
    x = side.array(64, dtype="int32")
    y = f(x)
    z = f(y)
    return {"deleted": side.gone(x, y), "value": side.values(z)}


def _prints(side: Side, times: int = 1) -> Observations:
    def f(x: Any, y: Any) -> Any:
        for _ in range(times):
            side.print("x", x)
        return x + y

    x, y = side.array(dtype="int32", value=2), side.array(dtype="int32", value=3)
    compiled = side.compile(f, donate_argnums=0)
    printed = side.printed(lambda: compiled(x, y))
    return {"printed": printed.split("\n")[:-1], "deleted": side.gone(x)}


for how, name, times in (
    ("", "test_can_stage_out_debug_print_with_donate_argnums", 1),
    (", in order", "test_can_stage_out_ordered_print_with_donate_argnums", 1),
    (", twice", "test_can_stage_out_prints_with_donate_argnums", 2),
):
    case(f"a donated argument is printed inside{how}", f"debugging_primitives_test::{name}")(
        functools.partial(_prints, times=times)
    )


def _nans(side: Side, place: Callable[[Any], Any]) -> Observations:
    x = place(side.array(DEVICES, value=0.0))
    f = side.compile(lambda x: place(0.0 / x), donate_argnums=0)
    with side.debug_nans():
        error = side.error(lambda: f(x))
    kept = side.gone(x)
    side.compile(lambda x: place(x + 1), donate_argnums=0)(x)
    return {"error": error, "deleted inside": kept, "deleted outside": side.gone(x)}


case("a NaN in a step that donates, while NaNs are looked for", "debug_nans_test::testDebugNansJitWithDonation")(
    lambda side: _nans(side, lambda x: x)
)
case("the same with a split array", "debug_nans_test::testDebugNansJitWithDonationSharded", spmd=True)(
    lambda side: _nans(side, side.split)
)

# --- export_test, layout_test, memories_test, xla_transform_test ---

nothing_here(
    "a donating function is exported and called from another one",
    "donation is a property of the call here; torch.export and torch_xla's StableHLO export carry no donors",
    "export_test::test_with_donation",
    "export_test::test_multi_platform_with_donation",
    "export_test::test_ordered_effects_with_donation",
)
nothing_here(
    "a donor and an output whose layouts are chosen",
    "torch_xla has no choice of layouts, so donor and output have XLA's default one",
    "layout_test::test_layout_donation",
    "layout_test::test_layout_donation_auto",
    "layout_test::test_layout_donation_matching_in_and_out",
    "layout_test::test_layout_donation_mismatching_in_and_out_fails",
    "layout_test::test_donation_error_on_auto",
)


@case(
    "the output that takes a buffer over is fixed before XLA compiles",
    "layout_test::test_layout_donation_with_default_layout",
    "as above: XLA chooses among all outputs; `donate_buffer(..., into=)` asks for one",
)
def _(side: Side) -> Observations:
    text = side.compile(lambda x: x * 2, donate_argnums=0).lower(side.array(16, 16)).as_text()
    return {"fixed": "tf.aliasing_output" in text or "input_output_alias" in text}


@case(
    "default memory: the compiled text shows the alias",
    "memories_test::test_single_mem_kind_donation_default_mem_kind",
)
def _(side: Side) -> Observations:
    x = side.array(8, 2)
    f = side.compile(lambda x: x * 2, donate_argnums=0)
    text = f.lower(x).compile().as_text()
    f(x)
    return {"alias": "input_output_alias" in text, "deleted": side.gone(x)}


nothing_here(
    "donors and outputs in different memories",
    "torch_xla has no memory kinds: every buffer is in the device's memory",
    "memories_test::test_disallow_alias_copies_arrays_with_donated_input",
    "memories_test::test_no_donation_across_memory_kinds",
    "memories_test::test_mem_kind_donation_pinned_host",
    "memories_test::test_identity_mem_kind_donation",
    "memories_test::test_compute_offload_with_donation",
)


@case(
    "the compiled function counts the donated bytes as aliased (JAX's test also registers an HLO pass)",
    "xla_transform_test::test_simple_transform_preserves_donation_and_aliasing",
)
def _(side: Side) -> Observations:
    x = side.array(10, 10)
    executable = side.compile(lambda x: x + x, donate_argnums=(0,)).lower(x).compile()
    memory = executable.memory_analysis()
    ours = side.name == "ours"
    argument, alias = (
        getattr(memory, f"{name}_bytes" if ours else f"{name}_size_in_bytes") for name in ("argument", "alias")
    )
    executable(x)
    return {"argument bytes": argument, "alias bytes": alias, "deleted": side.gone(x)}


# --- pjit_test: arrays split over devices ---


def _pjit(side: Side, *sizes: int, **options: Any) -> Any:
    return [side.split(side.array(2 * DEVICES, size, value=i + 1, **options)) for i, size in enumerate(sizes)]


@case("split arrays, donated by number", "pjit_test::testBufferDonation", spmd=True)
def _(side: Side) -> Observations:
    return side.donate(lambda x, y: side.split(x + y), *_pjit(side, 5, 5), donate_argnums=0)


@case("split arrays, donated by name", "pjit_test::testBufferDonationWithNames", spmd=True)
def _(side: Side) -> Observations:
    return side.donate(lambda a, b: side.split(a + b), *_pjit(side, 5, 5), donate_argnames="b")


@case("split arrays, given by keyword", "pjit_test::testBufferDonationWithKwargs", spmd=True)
def _(side: Side) -> Observations:
    def f(a: Any, b: Any, c: Any) -> Any:
        return side.split(a + b + c), side.split(c * 2)

    x, y, z = _pjit(side, 5, 5, 5)
    return side.donate(f, x, named={"b": y, "c": z}, donate_argnames=("b", "c"))


@case("pytrees of split arrays, given by keyword", "pjit_test::testBufferDonationWithPyTreeKwargs", spmd=True)
def _(side: Side) -> Observations:
    def f(a: Any, b: Any, c: Any) -> Any:
        return side.map(lambda i, j, k: side.split(i + j + k), a, b, c)

    trees = [{"a": {"b": x}, "c": y} for x, y in (_pjit(side, 5, 5) for _ in range(3))]
    return side.donate(f, trees[0], named={"b": trees[1], "c": trees[2]}, donate_argnames="b")


@case(
    "whole and split copies of donated arrays as results",
    "pjit_test::testBufferDonationWithOutputShardingInference",
    spmd=True,
)
def _(side: Side) -> Observations:
    def f(a: Any, b: Any, c: Any) -> Any:
        return [(side.split(t + 1, None), side.split(t * 2)) for t in (a, b, c)]

    return side.donate(f, *_pjit(side, 5, 7, 11), donate_argnames=("b", "c"))


nothing_here(
    "a callback with a token inside a donating step (TPU only)",
    "torch_xla has no callbacks inside a step; printing is in debugging_primitives_test's rows",
    "pjit_test::testBufferDonationWithOutputShardingInferenceAndTokens",
)


@case(
    "a split donor whose output has other bytes",
    "pjit_test::testBufferDonationNotDonated",
    "JAX leaves split donors to XLA and does not look what became of them",
    spmd=True,
)
def _(side: Side) -> Observations:
    (x,) = _pjit(side, 2)
    out = side.compile(lambda x: side.split(x @ x.T), donate_argnames="x")(x)
    side.settle()
    return {"deleted": side.gone(x), "value": side.values(out)}


@case("outputs of another shape, split alike", "pjit_test::testBufferDonationDifferentIOShapes", spmd=True)
def _(side: Side) -> Observations:
    def f(x: Any, y: Any) -> Any:
        return side.split(x + 1), side.split(y.reshape(16))

    x, y = side.split(side.array(16, value=2.0)), side.split(side.array(16, 1, value=3.0))
    return side.donate(f, x, y, donate_argnames=("x", "y"))


def _knows_its_donors(side: Side, **options: Any) -> Observations:
    lowered = side.compile(lambda inp, *rest: side.split(inp * 2), **options).lower(*_pjit(side, 2))
    return {"lowered": side.flags(lowered)}


case("the lowered function knows the number, split arrays", "pjit_test::testLowerDonateArgnumsAvailable", spmd=True)(
    functools.partial(_knows_its_donors, donate_argnums=(0,))
)
case("the same by name", "pjit_test::testLowerDonateArgnumsAvailableWithNames", spmd=True)(
    functools.partial(_knows_its_donors, donate_argnames=("inp",))
)


@case("a copy on the device outlives its source", "pjit_test::test_device_put_copy_donate")
def _(side: Side) -> Observations:
    y = side.array(1000, value=3.0)
    z = side.copied(y)
    return {**side.donate(lambda y: y * 2, y, donate_argnums=0), "copy": [side.gone(z), side.values(z)]}


nothing_here(
    "a transfer donates its source (`device_put(..., donate=)`)",
    "a transfer is not a step; `.to()` of a tensor that is on the device already is the tensor itself",
    "pjit_test::test_device_put_donate_pytree",
)
