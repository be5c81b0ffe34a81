"""The bytes on the wire: every word comes back as it was said, and no bytes do more than raise DecodeError.

A peer may be anything that found the socket: another release, another program, a damaged frame.
"""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from ckpt_client import wire
from ckpt_client.wire import DecodeError, FromRank, Position, Said, SavedFile, ToRank, Who
from hypothesis import HealthCheck, example, given, settings

SETTINGS = settings(
    max_examples=400, deadline=None, derandomize=False, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
"""Of each test in this file."""

texts = st.text(max_size=80)
any_int = st.integers(-(2**63), 2**64 - 1)
numbers = st.one_of(st.integers(0, 20), st.integers(0, wire.NUMBER_MAX), st.just(wire.NUMBER_MAX))
counts = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1))
whos = st.builds(Who, rank=st.integers(0, wire.WORLD_SIZE_MAX - 1), generation=counts, pid=st.integers(1, wire.NUMBER_MAX))
positions = st.builds(Position, numbers, numbers)
saved_files = st.builds(SavedFile, path=texts, size_bytes=counts, xxh3_128=texts)
thens = st.sampled_from(["leave", "go_on"])

hellos = st.builds(
    lambda who, room, version, local_rank, sharded: wire.Hello(
        who, version, min(who.rank + 1 + room, wire.WORLD_SIZE_MAX), local_rank, sharded
    ),
    whos,
    st.integers(0, wire.WORLD_SIZE_MAX),
    any_int,
    any_int,
    st.booleans(),
)
from_rank: st.SearchStrategy[Said] = st.one_of(
    hellos,
    st.builds(wire.Ack, whos, counts, positions),
    st.builds(wire.Arrived, whos, counts, positions),
    st.builds(wire.Saving, whos, counts),
    st.builds(wire.Saved, whos, counts, numbers, st.lists(saved_files, max_size=5).map(tuple), counts),
    st.builds(wire.Failed, whos, counts, texts),
    st.builds(wire.Finished, whos, counts),
    st.builds(wire.Left, whos, counts, st.booleans()),
    st.builds(
        wire.Progress,
        whos,
        positions,
        st.sampled_from(["starting", "phase", "over"]),
        texts,
        numbers,
        st.integers(0, 64),
        any_int,
    ),
)
"""Words whose numbers are in range."""

to_rank: st.SearchStrategy[ToRank] = st.one_of(
    st.builds(wire.Welcome, any_int, any_int, any_int, texts, any_int),
    st.builds(wire.Refused, texts),
    st.builds(wire.Prepare, any_int),
    st.builds(wire.SaveAt, any_int, st.builds(Position, any_int, any_int), texts, thens, any_int),
    st.builds(wire.Go, any_int, st.one_of(st.none(), thens)),
    st.builds(wire.Wait, any_int),
    st.builds(wire.Abort, any_int, texts),
    st.builds(wire.Leave, any_int),
)
words: st.SearchStrategy[Said | ToRank] = st.one_of(from_rank, to_rank)

plain = st.recursive(
    st.one_of(st.none(), st.booleans(), any_int, st.floats(), st.binary(max_size=20), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=20,
)
TAGS = [kind.__name__ for kind in (*FromRank.__args__, wire.Progress, *ToRank.__args__)]


def decode_both(frame: bytes) -> None:
    """Both ends read it: a word that can be said again, or DecodeError; nothing else."""
    for decode in (wire.decode_from_rank, wire.decode_to_rank):
        try:
            word = decode(frame)
        except DecodeError as error:
            assert str(error)
        else:
            assert decode(wire.encode(word)) == word


@SETTINGS
@given(from_rank)
def test_what_a_rank_says_arrives_as_it_was_said(word: Said) -> None:
    """The round trip is the identity for every word of a rank whose numbers are in range."""
    assert wire.decode_from_rank(wire.encode(word)) == word


@SETTINGS
@given(to_rank)
def test_what_a_supervisor_says_arrives_as_it_was_said(word: ToRank) -> None:
    """The round trip is the identity for every word to a rank."""
    assert wire.decode_to_rank(wire.encode(word)) == word


@SETTINGS
@given(words)
def test_a_word_of_the_other_direction_is_refused(word: Said | ToRank) -> None:
    """A rank that listens to a rank, or a supervisor that listens to one, hears nothing."""
    decode = wire.decode_to_rank if isinstance(word, Said) else wire.decode_from_rank
    with pytest.raises(DecodeError):
        decode(wire.encode(word))


@SETTINGS
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xdf\xff\xff\xff\xff")  # A map of four billion entries that are not there.
@example(b"\xdd\xff\xff\xff\xff")  # An array of as many.
@example(b"\x92\xa7Refused\xa1\xff")  # Text that is no UTF-8.
@example(b"\x91" * 100_000)  # Nested deeper than any stack.
@example(b"\xc1")
def test_bytes_that_are_no_word_raise_decode_error_only(frame: bytes) -> None:
    """Whatever arrives, the worst that happens is DecodeError with a reason."""
    decode_both(frame)


@SETTINGS
@given(plain)
def test_messages_of_other_programs_raise_decode_error_only(message: object) -> None:
    """MessagePack of another shape."""
    decode_both(msgspec.msgpack.encode(message))


@SETTINGS
@given(st.sampled_from(TAGS), st.lists(plain, max_size=7))
def test_words_with_the_wrong_fields_raise_decode_error_only(tag: str, fields: list[object]) -> None:
    """A known word's name in front of anything: another release, or a liar."""
    decode_both(msgspec.msgpack.encode([tag, *fields]))


@SETTINGS
@given(words, st.lists(st.tuples(st.sampled_from("xid"), st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_word_raises_decode_error_or_is_another_word(word: Said | ToRank, damage: list[tuple[str, int, int]]) -> None:
    """Bytes changed, inserted or dropped in a valid frame."""
    frame = bytearray(wire.encode(word))
    for kind, place, value in damage:
        at = place % (len(frame) + 1)
        if kind == "x":
            frame[at : at + 1] = bytes([value])
        elif kind == "i":
            frame[at:at] = bytes([value])
        else:
            del frame[at : at + 1 + value % 8]
    decode_both(bytes(frame))


@SETTINGS
@given(words, st.data())
def test_a_word_that_was_cut_off_is_never_taken_for_a_whole_one(word: Said | ToRank, data: st.DataObject) -> None:
    """No prefix of a frame is a word."""
    frame = wire.encode(word)
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for decode in (wire.decode_from_rank, wire.decode_to_rank):
        with pytest.raises(DecodeError):
            decode(cut)


@SETTINGS
@given(
    st.sampled_from([wire.Ack, wire.Arrived]),
    st.builds(Who, st.integers(-5, 5), st.integers(-5, 5), st.integers(-5, 5)),
    st.integers(-2, 2),
    st.builds(Position, any_int, any_int),
)
def test_numbers_out_of_range_never_reach_the_machine(
    kind: type[wire.Ack | wire.Arrived], who: Who, number: int, at: Position
) -> None:
    """Identities, rounds and positions that cannot be are refused at the door."""
    sane = who.rank >= 0 and who.generation >= 0 and who.pid > 0 and number >= 0
    sane = sane and 0 <= at.n <= wire.NUMBER_MAX and 0 <= at.k <= wire.NUMBER_MAX
    frame = wire.encode(kind(who, number, at))
    if sane:
        assert wire.decode_from_rank(frame) == kind(who, number, at)
    else:
        with pytest.raises(DecodeError):
            wire.decode_from_rank(frame)
