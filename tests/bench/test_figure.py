"""The bench's own arithmetic: what is over its bar, and what a percentile is."""

from __future__ import annotations

import pytest

from tests.bench.crowd import exponent
from tests.bench.figure import Row, not_measured, percentile, table


def test_a_figure_on_its_bar_is_ok_and_one_beyond_it_is_over() -> None:
    """The bar itself is allowed; a figure without a bar has no verdict."""
    assert [Row("f", value, "ms", 20.0).verdict for value in (19.9, 20.0, 20.1)] == ["ok", "ok", "over"]
    assert Row("f", 1e9, "ms").verdict == ""


def test_what_could_not_be_measured_counts_as_over() -> None:
    """A bench that breaks must not look like one that passed."""
    row = not_measured("signals", "timed out")
    assert row.verdict == "over"
    assert "not measured: timed out" in table([row])


def test_a_percentile_is_one_of_the_values_and_no_less_than_its_share() -> None:
    """p99 of 100 values is the second largest, of 10 the largest; the order they come in does not matter."""
    assert percentile(list(range(100, 0, -1)), 0.99) == 99
    assert percentile(list(range(1, 11)), 0.99) == 10
    assert percentile([7.0], 0.5) == 7.0


def test_the_exponent_is_the_power_of_n_that_the_times_grow_with() -> None:
    """Linear is 1 whatever the factor, quadratic 2."""
    sizes = [64, 256, 512, 1024, 2048]
    assert exponent(sizes, [3.0 * n for n in sizes]) == pytest.approx(1)
    assert exponent(sizes, [0.1 * n * n for n in sizes]) == pytest.approx(2)
