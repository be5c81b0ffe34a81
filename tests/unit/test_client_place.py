"""Positions of boundaries while phases come and go (docs/protocol.md, rule 8)."""

from __future__ import annotations

import pytest
from ckpt_client.place import Place
from ckpt_client.protocol import Rank
from ckpt_client.wire import Position, Who


def tour(script: str, n: int = 3, *, last: bool = False) -> list[tuple[tuple[int, int] | None, tuple[int, int]]]:
    """Boundary and `entered` after each act: E enter, A enter alone, s safe point, x leave; a boundary of None is no boundary."""
    rank = Rank(Who(0, 0, 1), n)
    rank.entered = n
    place = Place(rank)
    seen: list[tuple[tuple[int, int] | None, tuple[int, int]]] = []
    for act in script:
        if act == "s":
            here = place.safe_point()
        elif act == "x":
            here = place.leave(last=last)
        else:
            here = place.enter(n, alone=act == "A")
        seen.append((None if here is None else tuple(here), tuple(rank.position())))  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("Ex", [((3, 0), (3, 1)), ((3, 1), (4, 0))]),
        ("Essx", [((3, 0), (3, 1)), ((3, 1), (3, 2)), ((3, 2), (3, 3)), ((3, 3), (4, 0))]),
        ("Asx", [((3, 0), (3, 0)), ((3, 0), (3, 0)), ((3, 0), (4, 0))]),
        ("s", [(None, (4, 0))]),
        # The second phase after the same step goes on counting; its entrance is no boundary.
        ("ExEsx", [((3, 0), (3, 1)), ((3, 1), (4, 0)), (None, (3, 2)), ((3, 2), (3, 3)), ((3, 3), (4, 0))]),
        # A phase of its own before a common one does not shift the common positions.
        ("AsxEx", [((3, 0), (3, 0)), ((3, 0), (3, 0)), ((3, 0), (4, 0)), ((3, 0), (3, 1)), ((3, 1), (4, 0))]),
        # After a common one it stands where all last were.
        ("ExAsx", [((3, 0), (3, 1)), ((3, 1), (4, 0)), (None, (3, 1)), ((3, 1), (3, 1)), ((3, 1), (4, 0))]),
        # Nested: a phase of its own inside a common one, and the common one goes on.
        (
            "EsAsxsx",
            [
                ((3, 0), (3, 1)),
                ((3, 1), (3, 2)),
                (None, (3, 1)),
                ((3, 1), (3, 1)),
                ((3, 1), (3, 2)),
                ((3, 2), (3, 3)),
                ((3, 3), (4, 0)),
            ],
        ),
        ("AEsx", [((3, 0), (3, 0)), (None, (3, 0)), ((3, 0), (3, 0)), (None, (3, 0))]),
    ],
)
def test_positions_follow_the_safe_points(script: str, expected: list[object]) -> None:
    """Each act stores `entered` and gives the position of the boundary to test, as docs/protocol.md has it."""
    assert tour(script) == expected


def test_the_last_phase_leaves_entered_where_it_is() -> None:
    """Rule 9: with no step to follow, a save asked for now is still taken at the end of the phase."""
    assert tour("Esx", last=True)[-1] == ((3, 2), (3, 2))


def test_a_step_boundary_after_phases_has_the_position_of_their_end() -> None:
    """Passing the boundary of a step again, after its phases, gives the same on all ranks; the next step starts at k = 0."""
    place = Place(Rank(Who(0, 0, 1), 3))
    assert place.at(3) == Position(3, 0)
    place.enter(3, alone=False)
    place.safe_point()
    place.leave(last=False)
    assert place.at(3) == Position(3, 2)
    assert place.at(4) == Position(4, 0)


def test_no_boundary_lies_beyond_what_entered_said() -> None:
    """An answer given at any moment names a position that this rank has still before it, or stands at."""
    for script in ("Essx", "ExEsx", "AsxEx", "ExAsx", "AssxEsxAsx", "EsAsxsx"):
        promised = (3, 0)
        for boundary, entered in tour(script):
            if boundary is not None:
                assert promised >= boundary
            promised = entered


def walk(scripts: tuple[str, ...]) -> list[tuple[Position, Position]]:
    """All boundaries of a `steps()` loop whose steps are followed by these phases, each with what `entered` says at it."""
    rank = Rank(Who(0, 0, 1), 0)
    place = Place(rank)
    seen = []
    for n in range(len(scripts) + 1):
        rank.entered = n
        seen.append((place.at(n), rank.position()))
        for act in scripts[n] if n < len(scripts) else "":
            if act == "s":
                here = place.safe_point()
            elif act == "x":
                here = place.leave(last=False)
            else:
                here = place.enter(n + 1, alone=act == "A")
            if here is not None:
                seen.append((here, rank.position()))
    return seen


def meets(ahead: list[Position], at: Position) -> bool:
    """Whether the first boundary at or beyond this position is that position."""
    return next((here for here in ahead if here >= at), at) == at


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("", ""),
        ("Essx", "Essx"),
        ("ExEsxEsEsxsx", "ExEsxEsEsxsx"),
        ("Asx", ""),
        ("AsxAx", ""),
        ("AsxEsx", "Esx"),
        ("EsxAsx", "Esx"),
        ("EsxAsxEsx", "EsxEsx"),
        ("EsAsxsx", "Essx"),
        ("EsEAsxsxsx", "EsEsxsx"),
        ("AsAsxsx", ""),
    ],
)
def test_a_rank_with_phases_of_its_own_meets_the_others_at_the_agreed_position(mine: str, theirs: str) -> None:
    """Wherever Prepare finds two ranks, both have a boundary at exactly the larger of what they say."""
    first, second = walk((mine, "", mine)), walk((theirs, "", theirs))
    for i, (_, said) in enumerate(first):
        for j, (_, heard) in enumerate(second):
            at = max(said, heard)
            # Prepare came before the test of this boundary, or after it.
            for ahead in (first[i:], first[i + 1 :]):
                assert meets([here for here, _ in ahead], at)
            for ahead in (second[j:], second[j + 1 :]):
                assert meets([here for here, _ in ahead], at)
