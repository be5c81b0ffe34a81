"""Reading what a pickle says: all of it, nothing done of it, and no more time or memory than the bounds allow."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.store import pickle_machine
from ckpt_supervisor.store.pickled import Call, Global, Key, Persistent, PickleProblem, read_pickle
from hypothesis import given, settings
from hypothesis import strategies as st

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
ATOMS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=300))
KEYS = st.one_of(st.text(max_size=5), st.integers(-(2**59), 2**59), st.binary(max_size=5))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(KEYS, inner), st.tuples(inner), st.tuples(inner, inner, inner, inner), st.sets(KEYS)
    ),
)


def plain(value: Any) -> Any:
    """The value with the calls carried out by which the old protocols write bytes and sets."""
    if type(value) is Call:
        args = plain(value.args)
        match value.func.name:
            case "encode":
                return args[0].encode(args[1])
            case "bytes":
                return b"".join(args)
            case "set":
                return set(args[0])
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is set:
        return set(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value


@settings(max_examples=300, deadline=None)
@given(value=VALUES, protocol=st.sampled_from(PROTOCOLS), before=st.binary(max_size=10))
def test_plain_data_comes_back_as_it_was(value: Any, protocol: int, before: bytes) -> None:
    """Every protocol, at any offset; the end is told, so that pickles can stand behind each other."""
    data = before + pickle.dumps(value, protocol) + b"more"
    found, end = read_pickle(data, len(before))
    assert end == len(data) - len(b"more")
    if protocol > 3:
        assert found == plain(found) == value
    else:
        assert plain(found) == value or protocol < 2  # a bytes key is a call there, and no bytes


def test_what_is_shared_stays_shared_and_cycles_end() -> None:
    """A list within itself, and one list in two places."""
    inner: list[Any] = [1]
    inner.append(inner)
    for protocol in PROTOCOLS:
        found, _ = read_pickle(pickle.dumps({"a": inner, "b": inner}, protocol))
        assert found["a"] is found["b"] is found["a"][1]


def test_the_opcodes_of_old_picklers_are_read() -> None:
    """Texts of Python 2, classes of old style, memo entries out of order, and integers on lines of their own."""
    for data, wanted in (
        (b"S'a\\x41'\n.", "aA"),
        (b"U\x02\xc3\xa9.", "\u00c3\u00a9"),
        (b"Va\\u0041\n.", "aA"),
        (b"I01\n.", True),
        (b"L12L\n.", 12),
        (b"F1.5\n.", 1.5),
        (b"(I1\nI2\nd.", {1: 2}),
        (b"(I1\nl.", [1]),
        (b"(I1\nt.", (1,)),
        (b"K\x01K\x02r\x05\x01\x00\x000j\x05\x01\x00\x00.", None),
        (b"(K\x01(K\x022100K\x03l.", None),
    ):
        if wanted is not None:
            assert read_pickle(data)[0] == wanted
    found, _ = read_pickle(b"]r\x05\x01\x00\x00K\x01a0j\x05\x01\x00\x00.")
    assert found == [1]
    made, _ = read_pickle(b"(imodule\nname\n.")
    assert (made.func.module, made.func.name, made.args) == ("module", "name", ())


class Made:
    """Something of a class, with a state."""

    def __init__(self) -> None:
        self.number = 5


def test_classes_become_stubs_with_all_that_would_be_put_into_them() -> None:
    """Name, arguments, state and items; nothing is looked up."""
    ordered = collections.OrderedDict(a=1)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (made, items, path), _ = read_pickle(pickle.dumps((Made(), ordered, Path("a/b")), protocol))
        assert (made.func.name, made.state) == ("Made", {"number": 5})
        assert (items.func.module, items.func.name, items.items) == ("collections", "OrderedDict", [("a", 1)])
        assert (path.func.name, path.args) == (type(Path()).__name__, ("a", "b"))
    assert repr(made.func) == f"<{Made.__module__}.Made>"


class Pickler(pickle.Pickler):
    """Keeps bytes outside."""

    def persistent_id(self, obj: object) -> Any:
        """The bytes' length."""
        return ("bytes", len(obj)) if isinstance(obj, bytes) else None


def test_persistent_ids_are_told_in_their_order(tmp_path: Path) -> None:
    """They stand in the value as stubs, and all of them in a list."""
    with (tmp_path / "file").open("wb") as file:
        Pickler(file).dump([b"abc", b"", b"abc"])
    met: list[Any] = []
    value, _ = read_pickle((tmp_path / "file").read_bytes(), persistent=met)
    assert met == [("bytes", 3), ("bytes", 0), ("bytes", 3)]
    assert all(type(item) is Persistent for item in value)


def problem_of(data: bytes) -> PickleProblem:
    """Why this is not read."""
    with pytest.raises(PickleProblem) as caught:
        read_pickle(data)
    return caught.value


def test_every_cut_is_told_from_damage() -> None:
    """Whatever the protocol and the place, a pickle that ends early is `cut`."""
    value = {"a": [1, 2.5, "text" * 100, b"x" * 300, None, (1, 2, 3, 4)], "b": {3: 10**30}, "c": Made()}
    for protocol in PROTOCOLS:
        data = pickle.dumps(value, protocol)
        for length in range(len(data)):
            assert problem_of(data[:length]).kind == "cut", (protocol, length)


@settings(max_examples=1000, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(pickletools.opcodes), max_size=40).map(
        lambda opcodes: b"".join(opcode.code.encode("latin-1") for opcode in opcodes)
    )),
    at=st.integers(0, 10_000), bit=st.integers(0, 7), whole=st.booleans(),
)  # fmt: skip
def test_whatever_the_bytes_are_they_are_read_or_refused(data: bytes, at: int, bit: int, whole: bool) -> None:
    """Random bytes, random opcodes, and good pickles with a flipped bit end in a value or in a PickleProblem."""
    if whole:
        good = bytearray(pickle.dumps({"a": [1, (2, 3)], "b": Made(), "c": {1, 2}, "data": data}))
        good[at % len(good)] ^= 1 << bit
        data = bytes(good)
    try:
        _, end = read_pickle(data + b".")
    except PickleProblem as problem:
        assert problem.kind in ("cut", "broken", "bounds")
        assert problem.reason
        assert 0 <= problem.offset <= len(data) + 1
    else:
        assert 0 < end <= len(data) + 1


def test_nonsense_is_broken() -> None:
    """Unknown opcodes, values for what takes none, and an end with something left over."""
    for data in (
        b"\xff.", b"..", b"\x80\x09N.", b"a.", b"K\x01K\x02a.", b"h\x07.", b"K\x01K\x02R.", b"]K\x01b.", b"K\x01K\x02\x93.",
        b"(.", b"NN.", b"e.", b"]]s.", b"}(K\x01u.", b"X\x01\x00\x00\x00\xff.", b"Iabc\n.", b"Sabc\n.", b"K\x01)R.", b"u.",
    ):  # fmt: skip
        assert problem_of(data).kind == "broken", data
    for data in (b"\x82\x01.", b"\x97."):
        assert problem_of(data).kind == "bounds"


def test_dict_keys_are_hashed_only_where_that_is_cheap() -> None:
    """Tuples that stand for each other twice at each of a thousand levels, and integers of one hash, become Keys."""
    levels = b")" + b"2\x86" * 400
    value, _ = read_pickle(b"}" + levels + b"K\x01s.", nesting_max=None)
    ((key, item),) = value.items()
    assert (type(key), item) == (Key, 1)
    met = [b"\x8a\x0a" + ((2**61 - 1) * number).to_bytes(10, "little") + b"N" for number in range(10, 100_000)]
    value, _ = read_pickle(b"}(" + b"".join(met) + b"u.")
    assert (len(value), {type(key) for key in value}) == (len(met), {Key})
    value, _ = read_pickle(pickle.dumps({1.5: 1, None: 2, True: 3, b"x": 4, -5: 5, int: 6}))
    assert list(value)[:5] == [1.5, None, True, b"x", -5]
    assert type(list(value)[5]) is Global


def memo(opcode: bytes, index: int) -> bytes:
    """A memo opcode with an index of 32 bits."""
    return opcode + index.to_bytes(4, "little")


SPARSE = b"]" + b"".join(memo(b"r", 2**32 - 1 - n * 65536) for n in range(60_000))
LISTS_WITHIN_LISTS = b"(]" + b"".join(memo(b"r", n) + b"]" + memo(b"j", n) + b"a" for n in range(99_000)) + b"l"
BOMBS = {
    "memo index": (b"\x80\x04]r\xff\xff\xff\xff.", "value"),
    "memo indexes": (SPARSE + b".", "value"),
    "bytes": (b"\x8e" + (2**62).to_bytes(8, "little") + b"x.", "cut"),
    "bytes of 32 bits": (b"B\xff\xff\xff\xffx.", "cut"),
    "text": (b"\x8d" + (2**62).to_bytes(8, "little") + b"x.", "cut"),
    "negative text": (b"\x8d" + b"\xff" * 8 + b"x.", "cut"),
    "integer": (b"\x8b\xff\xff\xff\x7f.", "bounds"),
    "digits": (b"I" + b"9" * 5000 + b"\n.", "bounds"),
    "line": (b"S'" + b"a" * 2_000_000 + b"'\n.", "bounds"),
    "frame": (b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N.", "cut"),
    "depth of tuples": (b")" + b"\x85" * 2_000_000 + b".", "bounds"),
    "depth of calls": (b"cos\nsystem\n" + b")R" * 1_000_000 + b".", "bounds"),
    "depth of lists": (b"]" * 500_000 + b"a" * 499_999 + b".", "bounds"),
    "depth by memo": (LISTS_WITHIN_LISTS + b".", "bounds"),
    "marks": (b"(" * 4_100_000 + b".", "bounds"),
    "stack": (b"N" * 4_100_000 + b".", "bounds"),
    "sets": (b"(" + b"\x8f0" * 5_000_000 + b"l.", "bounds"),
    "keys": (b"}" + b")" + b"2\x86" * 100_000 + b"K\x01s.", "bounds"),
    "doubling": (b"]" + b"(22l" * 100_000 + b".", "broken"),
}  # fmt: skip
READER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from ckpt_supervisor.store.pickled import PickleProblem, read_pickle
data = sys.stdin.buffer.read()
try:
    read_pickle(data)
    print("value")
except PickleProblem as problem:
    print(problem.kind)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_within_bounded_memory(bomb: str) -> None:
    """Huge counts, depths and numbers of values end in a word, with no more than 2 GiB of address space (field case 87)."""
    data, kind = BOMBS[bomb]
    done = subprocess.run([sys.executable, "-c", READER], input=data, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
    found, megabytes = done.stdout.decode().split()
    assert found == kind
    assert int(megabytes) < 1536


class Runs:
    """A command, when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """What a hostile pickle has in it."""
        return (os.system, (f"touch {self.marker}",))


def test_nothing_is_executed_and_nothing_imported(tmp_path: Path) -> None:
    """os.system is a name, and a module that nobody has is no error."""
    marker = tmp_path / "marker"
    for protocol in PROTOCOLS:
        value, _ = read_pickle(pickle.dumps([Runs(marker)], protocol))
        assert value[0].func.name == "system"
    assert not marker.exists()
    value, _ = read_pickle(b"cno_such_module\nname\n.")
    assert value.module == "no_such_module"
    assert "no_such_module" not in sys.modules


def test_the_bound_of_nesting_is_the_deepest_that_passes() -> None:
    """500 levels, and one more."""
    deep = b")" + b"\x85" * pickle_machine.NESTING_MAX + b"."
    assert problem_of(deep).kind == "bounds"
    assert read_pickle(deep[:1] + deep[2:])[1] == len(deep) - 1
    assert read_pickle(deep, nesting_max=None)[1] == len(deep)
