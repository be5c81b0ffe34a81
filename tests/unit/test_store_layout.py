"""The names in a checkpoint directory: only our own spelling is ours, and steps are numbers."""

from __future__ import annotations

import pytest
from ckpt_supervisor.store import layout
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.integers(min_value=0, max_value=layout.NUMBER_MAX)


@given(NUMBERS)
def test_a_step_survives_its_name(step: int) -> None:
    """Writing a step as a name and reading it back gives the same step."""
    assert layout.parse_step(layout.step_name(step)) == step


@given(NUMBERS, NUMBERS, NUMBERS)
def test_hidden_names_survive_and_are_not_mistaken_for_each_other(step: int, epoch: int, k: int) -> None:
    """Each kind of hidden name is read back by its own reader and by no other."""
    pairs = (
        (layout.partial_name, layout.parse_partial),
        (layout.trash_name, layout.parse_trash),
        (layout.damaged_name, layout.parse_damaged),
    )
    for write, read in pairs:
        name = write(step, epoch, k)
        readers = [other for _, other in pairs if other(name) is not None]
        assert readers == [read]
        assert read(name) == (step, epoch, k)
        assert layout.parse_step(name) is None
        assert len(name) <= 255


@given(st.text(max_size=40))
def test_whatever_is_read_as_ours_is_spelled_as_we_spell_it(name: str) -> None:
    """No text but the canonical one is taken for a name of ours."""
    step = layout.parse_step(name)
    assert step is None or layout.step_name(step) == name
    parts = layout.parse_partial(name)
    assert parts is None or layout.partial_name(*parts) == name


def test_the_documented_spelling() -> None:
    """The names are those of the documentation, to the letter."""
    assert layout.step_name(1200) == "step-000001200"
    assert layout.partial_name(1200, 3, 7) == ".partial-step-000001200-3-7"
    assert layout.step_name(12_345_678_901) == "step-12345678901"


def test_order_is_numeric_also_where_the_digits_do_not_suffice() -> None:
    """A step with ten digits is newer than one with nine, though as text it sorts before it."""
    names = [layout.step_name(step) for step in (999_999_999, 1_000_000_000, 2)]
    assert sorted(names)[-1] != layout.step_name(1_000_000_000)
    assert max(names, key=lambda name: layout.parse_step(name) or 0) == layout.step_name(1_000_000_000)


@pytest.mark.parametrize(
    "name",
    [
        "100000", "0900000", "handpicked", "best", "step_12.bak", "step_-1", "step_1e5", "step_999", "step-12",
        "step-", "step-00000012", "step-0000000012", "step-000000012.bak", "step-000000012\n",
        " step-000000012", "Step-000000012",
        "step-٠٠٠٠٠٠٠١٢", "step-+00000012", "step-1e0000000", "step-" + "9" * 19, "latest", "attempt", "journal", "",
    ],
)  # fmt: skip
def test_foreign_names_are_not_steps(name: str) -> None:
    """Names that people and other programs make are nobody's checkpoint (field cases 89 and 90)."""
    assert layout.parse_step(name) is None


@pytest.mark.parametrize(
    "name",
    [
        ".partial-step-000000012", ".partial-step-000000012-1", ".partial-step-12-1-1", ".partial-step-000000012-01-1",
        ".partial-step-000000012-1-1-1", "partial-step-000000012-1-1", ".partial-step-000000012-1--1", ".partial-",
        ".trash",
    ],
)  # fmt: skip
def test_foreign_names_are_not_partial(name: str) -> None:
    """A name that is almost a partial one is left alone."""
    assert layout.parse_partial(name) is None
    assert layout.parse_trash(name) is None


@pytest.mark.parametrize("number", [-1, layout.NUMBER_MAX + 1])
def test_a_number_out_of_range_makes_no_name(number: int) -> None:
    """A number that could not be read back is refused before it becomes a name."""
    with pytest.raises(ValueError, match="cannot be part of a name"):
        layout.step_name(number)
