"""TORCH_XLA_DONATE=0: the package is loaded without its hooks, and programs compute what they do without donation."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
import torch_xla
from children import in_process, run_command, run_in_child

import torch_xla_donate as txd
from torch_xla_donate import testing

OFF = {"TORCH_XLA_DONATE": "0"}
SAYS = "TORCH_XLA_DONATE=0 switches torch_xla_donate off: nothing is hooked, and nothing is donated."
pytestmark = pytest.mark.filterwarnings("ignore:TORCH_XLA_DONATE=0 switches torch_xla_donate off")


def array(rows: int = 3) -> torch.Tensor:
    made = torch.arange(12.0).reshape(3, 4)[:rows].to("xla")
    torch_xla.sync()
    return made


def step() -> tuple[torch.Tensor, torch.Tensor]:
    old = array()
    new = old * 2
    txd.donate_buffer(old)
    torch_xla.sync()
    return old, new


def marked() -> Any:
    return step()[1]


def in_mode(mode: Any) -> Any:
    with mode:
        return marked()


def compiled(**options: Any) -> Any:
    step = txd.compile(lambda a, b: {"sum": a + b}, donate_argnums=0, **options)
    return [step(array(), array()), step(array(), array())]


def accumulated() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to("xla")
    slices = array().reshape(3, 1, 4)

    def step(x: torch.Tensor, total: torch.Tensor, count: torch.Tensor, twice: torch.Tensor) -> Any:
        return model(x).sum(), total + x, count + 1, twice * 2

    carried = [array(1) + offset for offset in (0.0, 7.0, 9.0)]
    results = txd.gradient_accumulation(step, (slices,), model, *carried)
    torch_xla.sync()
    return [*results, *(parameter.grad for parameter in model.parameters())]


def layers_called() -> Any:
    torch.manual_seed(0)
    return txd.scan_layers([torch.nn.Linear(4, 4).to("xla") for _ in range(3)], array(), donate=True)


def jax_called() -> Any:
    jax = pytest.importorskip("jax")
    return txd.call_jax(jax.jit(lambda a: a * 2, donate_argnums=0), (array(),))


def module_called() -> Any:
    from torch_xla.core import xla_builder as xb

    made = xb.create_computation("twice", lambda a: a + a, [xb.mkshape("f32", (3, 4))])
    return txd.user_computation("xla::twice", [array()], made)


def dumped() -> Any:
    with tempfile.TemporaryDirectory() as folder, testing.HloDump(folder) as dump:
        result = marked()
        assert isinstance(dump.modules(), tuple)
    return result


#: A call of each public function that gives the same with and without the package.
CALLS: dict[str, Callable[[], Any]] = {
    "advise": lambda: isinstance(txd.advise(marked), txd.Advice),
    "auto_donate": lambda: in_mode(txd.auto_donate()),
    "call_jax": jax_called,
    "cancel_donation": lambda: txd.cancel_donation({"a": array()}),
    "compile": lambda: [compiled(), compiled(pure=True), compiled(backend="openxla")],
    "debug_nans": lambda: in_mode(txd.debug_nans()),
    "donate_buffer": marked,
    "donation_disabled": lambda: in_mode(txd.donation_disabled(report_reuse=True)),
    "donation_report": lambda: isinstance(txd.donation_report(steps=1), txd.DonationReport),
    "expect_donated": lambda: in_mode(txd.expect_donated(0.5)),
    "gradient_accumulation": accumulated,
    "is_donated": lambda: txd.is_donated(array()),
    "placeholder": lambda: list(txd.placeholder((2, 3), torch.float32).shape),
    "placeholder_like": lambda: list(txd.placeholder_like([array()])[0].shape),
    "scan": lambda: txd.scan(lambda carry, x: (carry + x, carry * x), array()[0] + 0, array(), donate="xs"),
    "scan_layers": lambda: layers_called(),
    "set_auto_donate": lambda: [txd.set_auto_donate(True), marked(), txd.set_auto_donate(False)],
    "testing.HloDump": dumped,
    "testing.assert_aliased": lambda: testing.assert_aliased(
        "HloModule step, input_output_alias={ {}: (0, {}, may-alias) }, "
        "entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n"
    ),
    "testing.assert_donated": lambda: testing.assert_donated(step()[0]),
    "testing.assert_not_donated": lambda: testing.assert_not_donated(array()),
    "testing.assert_reused": lambda: [marked(), testing.assert_reused(0.1, steps=1)],
    "testing.no_unusable_donation": lambda: in_mode(testing.no_unusable_donation()),
    "user_computation": module_called,
}


def values(name: str) -> Any:
    """What the call gives, with numbers in place of tensors."""
    value = CALLS[name]()
    torch_xla.sync()
    return torch.utils._pytree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, value)


def functions() -> dict[str, Any]:
    """The public functions and the classes that a program calls; not those of results and errors."""
    found = {name: getattr(txd, name) for name in txd.__all__}
    found |= {f"testing.{name}": getattr(testing, name) for name in testing.__all__}
    return {name: one for name, one in found.items() if inspect.isfunction(one) or name.split(".")[-1] in MODES}


MODES = {"auto_donate", "debug_nans", "donation_disabled", "expect_donated", "HloDump", "no_unusable_donation"}


def all_values() -> dict[str, Any]:
    assert txd.donation_report(steps=1).donors == ()
    return {name: values(name) for name in CALLS}


def test_each_public_function_returns_what_it_does_without_donation() -> None:
    assert functions().keys() == CALLS.keys()
    off, on = (run_in_child(all_values, env=env).value for env in (OFF, {}))
    assert off == on


# What each refuses, with the package and without it. The error comes before anything runs.
WRONG: dict[str, Callable[[], Any]] = {
    "advise": lambda: txd.advise(3),  # type: ignore[arg-type]
    "auto_donate": lambda: txd.auto_donate(1),  # type: ignore[arg-type]
    "call_jax": lambda: txd.call_jax(len, ((),), strict="x"),  # type: ignore[arg-type]
    "cancel_donation": lambda: txd.cancel_donation(["x"]),
    "compile": lambda: txd.compile(lambda a: a, donate_argnums=4),
    "compile, backend": lambda: txd.compile(lambda a: a, backend="x"),  # type: ignore[call-overload]
    "compile, generator": lambda: txd.compile((lambda: (yield)), pure=True),
    "compile, call": lambda: txd.compile(lambda a: a, static_argnums=0)([]),
    "debug_nans": lambda: txd.debug_nans()(lambda: (yield)),
    "donate_buffer": lambda: txd.donate_buffer([array(), 3]),
    "donate_buffer, device": lambda: txd.donate_buffer(torch.ones(3)),
    "donate_buffer, into": lambda: txd.donate_buffer([array()], into=[array(), array()]),
    "donate_buffer, strict": lambda: txd.donate_buffer(array(), strict="x"),  # type: ignore[arg-type]
    "donation_report": lambda: txd.donation_report(steps=0),
    "expect_donated": lambda: txd.expect_donated(2),
    "gradient_accumulation": lambda: txd.gradient_accumulation(len, (), torch.nn.ReLU(), donate="x"),
    "is_donated": lambda: txd.is_donated(3),  # type: ignore[arg-type]
    "scan": lambda: txd.scan(len, array(), array(), donate="x"),  # type: ignore[arg-type]
    "scan_layers": lambda: txd.scan_layers([], array(), stacklevel=0),
    "set_auto_donate": lambda: txd.set_auto_donate(1),  # type: ignore[arg-type]
    "testing.assert_donated": lambda: testing.assert_donated([]),
    "testing.assert_reused": lambda: testing.assert_reused(2),
    "user_computation": lambda: txd.user_computation("a::b", [array()], 3),
}


def errors() -> dict[str, str]:
    found = {}
    for name, call in WRONG.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_wrong_arguments_raise_the_same_errors() -> None:
    here = errors()
    assert here.keys() == WRONG.keys()
    assert run_in_child(errors, env=OFF).value == here


@in_process(env=OFF)
def test_what_needs_the_hooks_says_so() -> None:
    with pytest.raises(txd.DonationError, match="lower of <lambda> needs the hooks"):
        txd.compile(lambda a: a).lower(array())
    assert str(txd.donation_report()) == SAYS and not txd.donation_report()


@pytest.mark.parametrize("version", ["2.9.0", "2.4.0", "3.0"])
def test_nothing_is_hooked_on_any_version(version: str) -> None:
    """Not even the extension module is loaded: torch_xla's relocated data stays byte for byte."""
    (warning,) = run_in_child(bare.import_switched_off, version, env=OFF).value
    assert warning.startswith(f"DonationWarning: {SAYS} Unset it to donate.")


def test_with_the_switch_on_the_version_counts() -> None:
    assert "supports torch_xla" in run_in_child(bare.import_switched_off, "2.4.0", exit_code=1).stderr
    on = run_in_child(bare.import_switched_off, "2.4.0", env={"TORCH_XLA_DONATE": "1"}, exit_code=1)
    assert "supports torch_xla" in on.stderr


def test_another_value_fails_the_import() -> None:
    done = run_in_child(values, "is_donated", env={"TORCH_XLA_DONATE": "off"}, exit_code=1)
    assert "ValueError: TORCH_XLA_DONATE='off' is unknown. Set it to 0 to switch torch_xla_donate off" in done.stderr


# --- The command line ---


def test_doctor_names_the_switch() -> None:
    done = run_command("doctor", env=OFF, exit_code=1)
    assert "PROBLEM: TORCH_XLA_DONATE=0 switches the package off; unset it" in done.stdout


def test_verify_refuses_and_run_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('ran', sys.argv[1:], 'torch_xla_donate' in sys.modules)\n", encoding="utf-8")
    done = run_command("run", "--auto", str(script), "--epochs", "3", env=OFF)
    assert done.last_line == "ran ['--epochs', '3'] True"
    refused = run_command("verify", str(script), env=OFF, exit_code=2)
    assert "TORCH_XLA_DONATE=0 switches torch_xla_donate off, so no step has donors." in " ".join(
        refused.stderr.split()
    )
    assert "ran" not in refused.stdout
