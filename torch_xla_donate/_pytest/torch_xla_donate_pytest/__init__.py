"""The fixtures of torch_xla_donate. pytest loads them in every project, so they import the package in a test only."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch_xla_donate.testing import HloDump, no_unusable_donation


@pytest.fixture
def hlo_dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HloDump]:
    """The compiled modules of the steps of this test: `.modules()`, or as files in `.folder`."""
    from torch_xla_donate import testing

    with testing.HloDump(tmp_path_factory.mktemp("hlo_dump")) as dump:
        yield dump


_WATCH = pytest.StashKey["no_unusable_donation"]()


@pytest.fixture
def fail_on_unusable_donation(request: pytest.FixtureRequest) -> Iterator[no_unusable_donation]:
    """Fails the test if a donation of one of its steps was unusable."""
    from torch_xla_donate import testing

    watch = testing.no_unusable_donation()
    watch.enter()
    request.node.stash[_WATCH] = watch  # a test may also ask for the fixture while it runs
    yield watch
    watch.leave(raised=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    # Here and not in the fixture, whose end would be an error and not a failure.
    result = yield
    watch = item.stash.get(_WATCH, None)
    if watch is not None:
        watch.finish()
    return result
