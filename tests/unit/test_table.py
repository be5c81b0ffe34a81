"""The immutable table of entries by number, against a plain dict."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from ckpt_supervisor.core.table import BUCKET_BITS, Table
from hypothesis import given

BUCKET = 1 << BUCKET_BITS

numbers = st.one_of(st.integers(0, 5), st.sampled_from([BUCKET - 1, BUCKET, BUCKET + 1, 16_383]), st.integers(0, 70_000))
entries = st.lists(st.tuples(numbers, st.sampled_from(["a", "b", ""])), max_size=12)


def built(pairs: list[tuple[int, str]]) -> Table[str]:
    """One put after the other."""
    table: Table[str] = Table()
    for number, entry in pairs:
        table = table.put(number, entry)
    return table


@given(entries, numbers)
def test_it_holds_what_a_dict_holds(pairs: list[tuple[int, str]], other: int) -> None:
    """Look-ups, length and order, however the numbers fall into buckets."""
    table, wanted = built(pairs), dict(pairs)
    assert len(table) == len(wanted)
    assert list(table) == [wanted[number] for number in sorted(wanted)]
    for number in (*wanted, other):
        assert table.get(number) == wanted.get(number)


@given(entries)
def test_made_in_one_go_it_is_the_same_as_made_one_by_one(pairs: list[tuple[int, str]]) -> None:
    """Also where a number comes twice: the last one counts."""
    assert Table.of(pairs) == built(pairs)
    assert len(Table.of(pairs)) == len(built(pairs))


@given(entries, numbers, st.text(max_size=2))
def test_a_table_stays_as_it_is_when_one_is_made_from_it(pairs: list[tuple[int, str]], number: int, entry: str) -> None:
    """Put gives a new table: the machine's old state is compared with the new one."""
    before = built(pairs)
    after = before.put(number, entry)
    assert before == Table.of(dict(pairs).items())
    assert after == Table.of({**dict(pairs), number: entry}.items())
    assert (before == after) == (dict(pairs).get(number) == entry)


@given(entries, st.randoms())
def test_tables_are_equal_by_content_whatever_the_order_in_which_they_were_made(
    pairs: list[tuple[int, str]], rng: Random
) -> None:
    """As dicts are."""
    items = list(dict(pairs).items())
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert built(items) == built(shuffled)
    assert repr(built(items)) == repr(built(shuffled))


def test_a_change_copies_one_bucket_and_no_more() -> None:
    """With 16,384 ranks each word changes one entry: the others' buckets are shared, not copied."""
    table: Table[int] = Table.of((number, number) for number in range(16_384))
    changed = table.put(5, 0)
    shared = [high for high, bucket in table._buckets.items() if changed._buckets[high] is bucket]
    assert len(shared) == len(table._buckets) - 1


def test_a_table_is_no_key_and_equals_nothing_else() -> None:
    """Compared by content, so it has no hash."""
    table = built([(1, "a")])
    with pytest.raises(TypeError, match="unhashable"):
        hash(table)
    assert table != {1: "a"}
