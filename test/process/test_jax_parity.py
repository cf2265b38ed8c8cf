"""Each behaviour of JAX's donation is the same here, or differs for the reason that docs/jax.md gives."""

from __future__ import annotations

from collections import Counter

import pytest
from cases import CASES, PAGE
from helpers import needs_jax
from table import DOCUMENT, TABLE, Row, rows, table

pytestmark = needs_jax
COMPARED = [number for number, case in enumerate(CASES) if case.run is not None]


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows()


@pytest.mark.parametrize("number", COMPARED, ids=[CASES[number].behaviour for number in COMPARED])
def test_it_is_as_in_jax_or_there_is_a_reason(found: list[Row], number: int) -> None:
    case, jax, ours = found[number]
    assert jax is not None and ours is not None
    if case.reason:
        assert ours != jax, f"{case.sources}: there is no difference any more; take the reason out"
    else:
        assert ours == jax, case.sources


def test_each_test_of_jax_is_listed_once_or_has_a_reason() -> None:
    """No source has two cases, JAX's page excepted, and a case without a counterpart has a reason."""
    count = Counter(source for case in CASES for source in case.sources)
    assert {source for source, times in count.items() if times > 1} == {PAGE}
    assert all(case.reason for case in CASES if case.run is None)


def test_the_page_shows_the_table_that_the_cases_make(found: list[Row]) -> None:
    (shown,) = TABLE.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert shown == table(found), "write it again: python test/jax_parity/table.py"
