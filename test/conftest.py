"""Settings and fixtures of all Python tests."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before anything imports torch_xla.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
for setting in (
    "TORCH_XLA_DONATE",
    "TORCH_XLA_DONATE_DEBUG_NANS",
    "TORCH_XLA_DONATE_STRICT",
    "XLA_ENABLE_PARAM_ALIASING",
    "XLA_STABLEHLO_COMPILE",
    "XLA_AUTO_SPMD",
    "XLA_FLAGS",
):
    os.environ.pop(setting, None)

import hypothesis
import pytest
import support
from hypothesis import strategies

# `make test-all` chooses the long one.
for profile, examples in (("short", 60), ("long", 300)):
    hypothesis.settings.register_profile(profile, max_examples=examples, deadline=None)
hypothesis.settings.load_profile("short")
pytest.register_assert_rewrite("helpers")

if TYPE_CHECKING:
    import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write how many tests of each tier pass on this release (support.py)")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("record") and not hasattr(config, "workerinput"):
        support.record(terminalreporter.stats, config.getoption("record"))


def _runs_tests(session: pytest.Session) -> bool:
    return not session.config.getoption("numprocesses", None)  # the controller of pytest-xdist runs none


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Test modules import parts of torch_xla, which need the whole."""
    if _runs_tests(session):
        import torch_xla  # noqa: F401

        with contextlib.suppress(ImportError):  # the pinned one has no wheel for Python 3.10
            import jax  # noqa: F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes what imports have made: the collection after each test takes 0.25 s with it, and milliseconds without."""
    if _runs_tests(session):
        _first_random_test()
        gc.collect()
        gc.freeze()


@hypothesis.given(strategies.none())
def _first_random_test(_: None) -> None:
    """With `CI` in the environment Hypothesis asks in its first test who refers to its generator; the garbage collector
    does not name frozen objects."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder of a test is its mark."""
    for item in items:
        item.add_marker(item.path.parent.name)


def _keep_folders_apart(event: str, arguments: tuple[object, ...]) -> None:
    """A test in `unit/` or `step/` that starts a process fails at the line that starts it."""
    if event in ("children.run_in_child", "subprocess.Popen", "os.fork", "os.posix_spawn"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if os.path.basename(os.path.dirname(test.partition("::")[0])) in ("unit", "step"):
            raise RuntimeError(f"{test} starts a process ({event}): move it to test/process/")


sys.addaudithook(_keep_folders_apart)


@pytest.fixture(autouse=True, scope="session")
def _runtime_comes_first() -> None:
    """Autograd makes a queue for each device when it first runs: after a backward pass on the CPU it would have none
    for XLA's, which torch_xla reports when its runtime has started."""
    import torch_xla

    torch_xla.device()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """After each test: no new mark, no notice, hooks in place, donation enabled."""
    from torch_xla_donate import _C, _report

    # The traceback of a failed test keeps its tensors, and so its marks.
    before = len(_C.pending())
    yield
    _C.wait_for_steps()
    gc.collect()
    marks, notices = _C.pending(), _C.take_notices()
    _report.notices._warned_sites.clear()
    _report.notices._reported.clear()
    assert _C.installed()
    assert not _C.disabled()
    assert all(hook["slots"] == hook["in_place"] for hook in _C.hooks())
    assert len(marks) <= before, f"the test left marks: {marks}"
    assert not notices, f"the test left unusable donations untold: {notices}"


@pytest.fixture
def make() -> Callable[..., torch.Tensor]:
    """Makes a materialised XLA tensor: 0, 1, 2, ... in the shape given."""
    from helpers import make

    # A function of a module's top level: it travels to a child.
    return make


@pytest.fixture
def dump_folder(tmp_path: Path) -> Path:
    """The folder of XLA's dump, in a test with `in_process`."""
    folder = tmp_path / "dump"
    folder.mkdir()
    return folder


@pytest.fixture
def no_graphs_kept() -> None:
    """torch.compile keeps no graph of an earlier test."""
    import torch

    torch._dynamo.reset()


@pytest.fixture
def notices_taken() -> Iterator[None]:
    """For tests whose donors need not be usable: nobody has to be told of those that were not."""
    from torch_xla_donate import _C

    yield
    _C.wait_for_steps()
    _C.take_notices()


@pytest.fixture(scope="session")
def custom_operations() -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
    """Two operations of a user: one that computes on the host, and one that updates its argument."""
    import torch

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() * 2).to(x.device)

    def increased(x: torch.Tensor) -> None:
        x.add_(1)

    def made(name: str, function: Callable[..., Any], schema: str, mutates: tuple[str, ...]) -> Any:
        make = torch.library.custom_op(f"torch_xla_donate_tests::{name}", mutates_args=mutates, schema=schema)
        return make(function)

    on_host = made("doubled", doubled, "(Tensor x) -> Tensor", ())
    on_host.register_fake(torch.empty_like)
    in_place = made("increased", increased, "(Tensor(a!) x) -> ()", ("x",))
    in_place.register_fake(lambda x: None)
    return on_host, in_place
