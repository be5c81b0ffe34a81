"""The limits of the wire, one by one, and the bytes that two releases have to agree on."""

from __future__ import annotations

import msgspec
import pytest
from ckpt_client import wire
from ckpt_client.wire import DecodeError, FromRank, Position, Said, SavedFile, ToRank, Who

ME = Who(3, 1, 4242)
FILE = SavedFile("sub/état.pt", 7, "00ff")

FROM_RANK: list[Said] = [
    wire.Hello(ME, wire.VERSION, 4, 3, sharded=True),
    wire.Ack(ME, 5, Position(12, 1)),
    wire.Arrived(ME, wire.NO_ROUND, Position(12, 0)),
    wire.Saving(ME, 5),
    wire.Saved(ME, 5, 12, (FILE, FILE), 900),
    wire.Failed(ME, 5, "OSError: no space left"),
    wire.Finished(ME, wire.NO_ROUND),
    wire.Left(ME, 5, again=True),
    wire.Progress(ME, Position(12, 1), "phase", "eval", 900, 62, 7),
]
TO_RANK: list[ToRank] = [
    wire.Welcome(wire.VERSION, 0, 500, "/ckpt/step-000000500", 500),
    wire.Refused("rank 3 is taken"),
    wire.Prepare(5),
    wire.SaveAt(5, Position(12, 0), "/ckpt/.partial", "leave", 20_000),
    wire.Go(5),
    wire.Go(5, "leave"),
    wire.Wait(5),
    wire.Abort(wire.NO_ROUND, "rank 1 failed"),
    wire.Leave(5),
]


def name_of(word: object) -> str:
    """A word as a test's id."""
    return type(word).__name__


@pytest.mark.parametrize("word", FROM_RANK, ids=name_of)
def test_every_word_of_a_rank_comes_back_whole(word: Said) -> None:
    """Encoded and decoded it is equal, and of the same type."""
    found = wire.decode_from_rank(wire.encode(word))
    assert (found, type(found)) == (word, type(word))


@pytest.mark.parametrize("word", TO_RANK, ids=name_of)
def test_every_word_of_a_supervisor_comes_back_whole(word: ToRank) -> None:
    """Encoded and decoded it is equal, and of the same type."""
    found = wire.decode_to_rank(wire.encode(word))
    assert (found, type(found)) == (word, type(word))


def test_all_words_are_in_these_lists() -> None:
    """A new word is tested here, too."""
    assert {type(word) for word in FROM_RANK} == {*FromRank.__args__, wire.Progress}
    assert {type(word) for word in TO_RANK} == set(ToRank.__args__)


def test_the_bytes_of_hello_and_refused_never_change() -> None:
    """Two releases have to be able to tell each other that they do not fit: that word must be the same in all of them.

    An identity got a fourth part, the task, and may come without it.
    """
    hello = wire.Hello(Who(0, 0, 7), 1, 1, 0, sharded=False)
    assert wire.encode(hello) == b"\x96\xa5Hello\x94\x00\x00\x07\x00\x01\x01\x00\xc2"
    assert wire.decode_from_rank(b"\x96\xa5Hello\x93\x00\x00\x07\x01\x01\x00\xc2") == hello
    assert wire.encode(wire.Refused("no")) == b"\x92\xa7Refused\xa2no"


def test_a_word_with_fields_of_a_later_release_is_read_without_them() -> None:
    """More fields at the end do no harm, so that a later version can add one."""
    longer = msgspec.msgpack.encode(["Prepare", 5, "something new"])
    assert wire.decode_to_rank(longer) == wire.Prepare(5)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (["Hello", [0, 0, 0], 1, 1, 0, False], "identity"),
        (["Hello", [-1, 0, 7], 1, 1, 0, False], "identity"),
        (["Hello", [0, -1, 7], 1, 1, 0, False], "identity"),
        (["Hello", [1, 0, 7], 1, 1, 0, False], "rank 1 of a world of 1"),
        (["Hello", [0, 0, 7], 1, wire.WORLD_SIZE_MAX + 1, 0, False], "world"),
        (["Ack", [0, 0, 7], -1, [1, 0]], "round -1"),
        (["Ack", [0, 0, 7], 1, [-1, 0]], "position"),
        (["Ack", [0, 0, 7], 1, [1, wire.NUMBER_MAX + 1]], "position"),
        (["Arrived", [0, 0, 7], 1, [wire.NUMBER_MAX + 1, 0]], "position"),
        (["Saved", [0, 0, 7], 1, -1, [], 0], "range"),
        (["Saved", [0, 0, 7], 1, wire.NUMBER_MAX + 1, [], 0], "range"),
        (["Saved", [0, 0, 7], 1, 5, [], -1], "range"),
        (["Saved", [0, 0, 7], 1, 5, [["a", -1, ""]], 0], "range"),
        (["Saved", [0, 0, 7], 1, 5, [["a", 1, ""]] * (wire.FILES_MAX + 1), 0], "files"),
        (["Ack", [0, 0, 7], 1.5, [1, 0]], "int"),
        (["Ack", [0, 0], 1, [1, 0]], "length"),
        (["Ack", [0, 0, 7], 1], "length"),
        (["Left", [0, 0, 7], 1, "yes"], "bool"),
        (["Sing", [0, 0, 7]], "Sing"),
        (["Prepare", 5], "Prepare"),
        ([], "length"),
        ({"Ack": 1}, "array"),
        (None, "array"),
    ],
)
def test_words_that_cannot_be_are_refused_with_the_reason(fields: object, problem: str) -> None:
    """The reason is what the journal shows of the garbage."""
    with pytest.raises(DecodeError, match=problem):
        wire.decode_from_rank(msgspec.msgpack.encode(fields))


def test_the_largest_values_are_let_through() -> None:
    """A limit is the last value that is allowed."""
    top = Position(wire.NUMBER_MAX, wire.NUMBER_MAX)
    last = wire.Hello(Who(wire.WORLD_SIZE_MAX - 1, 0, 1), 1, wire.WORLD_SIZE_MAX, 0, sharded=False)
    full = wire.Saved(ME, 1, wire.NUMBER_MAX, (SavedFile("a", 0, ""),) * wire.FILES_MAX, 0)
    for word in (wire.Ack(ME, 0, top), last, full):
        assert wire.decode_from_rank(wire.encode(word)) == word


@pytest.mark.parametrize("decode", [wire.decode_from_rank, wire.decode_to_rank])
def test_a_frame_that_is_too_long_is_refused_unread(decode: object) -> None:
    """Its length is enough to know that it is no word."""
    assert callable(decode)
    frame = wire.encode(wire.Refused("x" * wire.FRAME_BYTES_MAX))
    with pytest.raises(DecodeError, match=f"more than {wire.FRAME_BYTES_MAX}"):
        decode(frame)


def test_a_full_report_of_saved_files_fits_into_a_frame() -> None:
    """The two limits agree for paths of a usual length; what does not fit is refused by the client before it is sent."""
    file = SavedFile("shards/layer-0123/part-01234567.distcp", 2**40, "f" * 32)
    full = wire.Saved(ME, wire.NUMBER_MAX, 10**9, (file,) * wire.FILES_MAX, 10**9)
    assert len(wire.encode(full)) < wire.FRAME_BYTES_MAX


def test_positions_are_ordered_by_steps_and_then_by_safe_points() -> None:
    """T is a maximum of them (docs/protocol.md, rule 3)."""
    assert Position(5, 9) < Position(6, 0) < Position(6, 1)
    assert max(Position(5, 9), Position(6, 0)) == Position(6, 0)
