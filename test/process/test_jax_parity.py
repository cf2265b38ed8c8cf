"""Each behaviour of JAX's donation is the same here, or differs for the reason that docs/jax.md gives."""

from __future__ import annotations

from collections import Counter

from cases import CASES, PAGE
from helpers import needs_jax
from table import DOCUMENT, TABLE, rows, table

pytestmark = needs_jax


def test_each_case_is_as_in_jax_or_there_is_a_reason_and_the_page_shows_it() -> None:
    found = rows()
    compared = [row for row in found if row[0].run is not None]
    assert len(compared) > 60
    for case, jax, ours in compared:
        assert jax is not None and ours is not None, case.sources
        if case.reason:
            assert ours != jax, f"{case.sources}: there is no difference any more; take the reason out"
        else:
            assert ours == jax, case.sources
    (shown,) = TABLE.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert shown == table(found), "write it again: python test/jax_parity/table.py"


def test_each_test_of_jax_is_listed_once_or_has_a_reason() -> None:
    """No source has two cases, JAX's page excepted, and a case without a counterpart has a reason."""
    count = Counter(source for case in CASES for source in case.sources)
    assert {source for source, times in count.items() if times > 1} == {PAGE}
    assert all(case.reason for case in CASES if case.run is None)
