"""The stack machine by which pickles are read, without its opcodes (pickled.py), and what it builds.

Owns the bounds, the stubs and the frequent opcodes. Must not import, call or look up anything that a pickle names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

BYTES_MAX = 256 * 1024 * 1024
"""Longest pickle."""

OPCODES_MAX = 30_000_000
"""Most opcodes: some 260,000 items of a DCP checkpoint, 10 seconds."""

MEMORY_MAX = 1024 * 1024 * 1024
"""Most memory for what is built, in bytes, by a rough count on the safe side."""

MEMO_MAX = 8_000_000
STACK_MAX = 4_000_000
NESTING_MAX = 500
"""Deepest value within a value. Nothing here recurses, but who reads the result may."""

LONG_BYTES_MAX = 1024
LINE_BYTES_MAX = 1024 * 1024
"""Longest integer; longest line of the text protocol 0."""

_ROUND = 2048
"""Opcodes between two looks at the bounds. One opcode can exceed them only by what its own bytes hold."""

_KEY_INT_MAX = 1 << 60
CONTAINER_BYTES, _ITEM_BYTES, _PAIR_BYTES, _ATOM_BYTES = 72, 8, 104, 32

Kind = Literal["cut", "broken", "bounds"]


class PickleProblem(Exception):
    """Why a pickle was not read: it ends early, it is none, or it is out of bounds. `offset` is that of an opcode."""

    def __init__(self, kind: Kind, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.offset = offset
        self.reason = reason


class Global:
    """Something that would be imported: a class or a function, by the names that the pickle gives."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __repr__(self) -> str:
        """`torch.Size`."""
        return f"<{self.module}.{self.name}>"


class Persistent:
    """Something outside the pickle, by its persistent id; in torch's files a storage."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    """An object that would be made by calling `func` with `args`, with what would then be put into it.

    `state` is what __setstate__ or __dict__ would get; `items` what would be appended, or (key, value) pairs set.
    """

    __slots__ = ("args", "func", "items", "state")

    def __init__(self, func: Any, args: Any) -> None:
        self.func = func
        self.args = args
        self.state: Any = None
        self.items: list[Any] | None = None


class Key:
    """A dict key or set element whose hash could cost without bound; compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def key_of(value: Any) -> Any:
    """What stands for this value as a dict key.

    Strings and bytes have a secret seed in their hash. The hash of integers and tuples can be met on purpose, so that a
    dict of them becomes a list, and that of nested tuples takes exponential time.
    """
    kind = type(value)
    if kind is str or kind is bytes or kind is bool or kind is float or value is None:
        return value
    if kind is int and -_KEY_INT_MAX < value < _KEY_INT_MAX:
        return value
    return value if kind is Global or kind is Call or kind is Persistent else Key(value)


class Machine:
    """One pickle being read.

    `at` is the next byte, `opcode_at` the opcode in hand; `marks` are places in the stack; `far` holds the memo entries
    that come out of order; `spent` is a rough count of the memory taken; `persistent` the persistent ids met.
    """

    def __init__(self, data: bytes, offset: int, operations: Mapping[int, Callable[[Machine], None]]) -> None:
        self.data = data
        self.operations = operations
        self.at = self.began = self.opcode_at = offset
        self.end = min(len(data), offset + BYTES_MAX)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}
        self.spent = 0
        self.persistent: list[Any] = []

    def problem(self, kind: Kind, reason: str) -> PickleProblem:
        """To be raised."""
        return PickleProblem(kind, self.opcode_at, reason)

    def cut(self) -> PickleProblem:
        """To be raised when the data ends before the pickle."""
        if self.end < len(self.data):
            return self.problem("bounds", f"a pickle of more than {BYTES_MAX} bytes")
        return self.problem("cut", "the pickle ends in the middle")

    def run(self) -> Any:
        """The value."""
        for _ in range(OPCODES_MAX // _ROUND):
            if self.round():
                if self.stack[1:] or self.marks:
                    raise self.problem("broken", "broken: something is left over at its end")
                return self.stack[0]
            for what, count, most in (
                ("memo entries", len(self.memo) + len(self.far), MEMO_MAX),
                ("values on its stack", len(self.stack) + len(self.marks), STACK_MAX),
                ("bytes of values", self.spent, MEMORY_MAX),
            ):
                if count > most:
                    raise self.problem("bounds", f"a pickle with more than {most} {what}")
        raise self.problem("bounds", f"a pickle of more than {OPCODES_MAX} opcodes")

    def round(self) -> bool:
        """Some opcodes; whether that was the last one. The frequent ones are done in place."""
        data, stack, memo, end, at = self.data, self.stack, self.memo, self.end, self.at
        for _ in range(_ROUND):
            if at >= end:
                self.opcode_at = at
                raise self.cut()
            code = data[at]
            if code == 0x94 and not self.far:  # MEMOIZE
                memo.append(stack[-1])
                at += 1
            elif code == 0x68 and at + 1 < end and data[at + 1] < len(memo):  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == 0x6A and at + 4 < end:  # LONG_BINGET
                index = data[at + 1] | data[at + 2] << 8 | data[at + 3] << 16 | data[at + 4] << 24
                if index < len(memo):
                    stack.append(memo[index])
                else:
                    self.opcode_at = at
                    self.get(index)
                at += 5
            elif code == 0x4B and at + 1 < end:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif code == 0x71 and at + 1 < end and data[at + 1] == len(memo):  # BINPUT
                memo.append(stack[-1])
                at += 2
            elif code == 0x28:  # MARK
                self.marks.append(len(stack))
                at += 1
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
                self.spent += CONTAINER_BYTES
                at += 1
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
                at += 1
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
                self.spent += CONTAINER_BYTES
                at += 1
            elif code == 0x2E:  # STOP
                self.opcode_at, self.at = at, at + 1
                return True
            else:
                self.opcode_at, self.at = at, at + 1
                operation = self.operations.get(code)
                if operation is None:
                    raise self.problem("broken", f"broken: {code:#04x} is no opcode")
                operation(self)
                at = self.at
        self.at = at
        return False

    def take(self, count: int) -> bytes:
        """The next bytes, as many as that."""
        start, stop = self.at, self.at + count
        if stop > self.end:
            raise self.cut()
        self.at = stop
        return self.data[start:stop]

    def number(self, bytes_: int) -> int:
        """The next bytes as an unsigned number."""
        return int.from_bytes(self.take(bytes_), "little")

    def line(self) -> bytes:
        """The next line, without its end."""
        stop = self.data.find(b"\n", self.at, min(self.end, self.at + LINE_BYTES_MAX))
        if stop < 0 and self.end - self.at >= LINE_BYTES_MAX:
            raise self.problem("bounds", f"a line of more than {LINE_BYTES_MAX} bytes")
        if stop < 0:
            raise self.cut()
        start, self.at = self.at, stop + 1
        return self.data[start:stop]

    def push(self, value: Any, cost: int = _ATOM_BYTES) -> None:
        """Onto the stack; `cost` in bytes of memory."""
        self.stack.append(value)
        self.spent += cost

    def text(self, length_bytes: int) -> None:
        """A string of so many bytes of UTF-8. Each can take four in memory, if one of them is of a rare letter."""
        raw = self.take(self.number(length_bytes))
        self.push(raw.decode("utf-8", "surrogatepass"), CONTAINER_BYTES + 4 * len(raw))

    def raw(self, length_bytes: int) -> bytes:
        """Bytes, or an old 8-bit string."""
        found = self.take(self.number(length_bytes))
        self.spent += CONTAINER_BYTES + len(found)
        return found

    def above_mark(self) -> list[Any]:
        """Take what lies on the stack above the last mark."""
        if not self.marks or self.marks[-1] > len(self.stack):
            raise self.problem("broken", "broken: a mark is missing")
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def put(self, index: int) -> None:
        """Into the memo."""
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            self.far[index] = self.stack[-1]
            self.spent += _PAIR_BYTES

    def get(self, index: int) -> None:
        """Out of the memo."""
        if 0 <= index < len(self.memo):
            self.stack.append(self.memo[index])
        elif index in self.far:
            self.stack.append(self.far[index])
        else:
            raise self.problem("broken", f"broken: nothing was put under {index}")

    def call(self, func: Any, args: Any) -> None:
        """An object that would be made."""
        kind = type(func)
        if kind is not Global and kind is not Call and kind is not Persistent:
            raise self.problem("broken", f"broken: calls {kind.__name__}")
        self.stack.append(Call(func, args))
        self.spent += CONTAINER_BYTES

    def extend(self, values: list[Any]) -> None:
        """Append to the list, or to the object that would be one, on top of the stack."""
        target = self.stack[-1]
        self.spent += _ITEM_BYTES * len(values)
        if type(target) is list:
            target.extend(values)
        elif type(target) is set:
            target.update(map(key_of, values))
            self.spent += _PAIR_BYTES * len(values)
        elif type(target) is Call:
            target.items = [] if target.items is None else target.items
            target.items.extend(values)
        else:
            raise self.problem("broken", f"broken: appends to {type(target).__name__}")

    def assign(self, flat: list[Any]) -> None:
        """Set keys, which alternate with their values, of the dict or object on top of the stack."""
        target = self.stack[-1]
        if len(flat) % 2:
            raise self.problem("broken", "broken: a key without a value")
        self.spent += _PAIR_BYTES * len(flat) // 2
        if type(target) is dict:
            keys = iter(flat)
            for key in keys:
                target[key if type(key) is str else key_of(key)] = next(keys)
        elif type(target) is Call:
            target.items = [] if target.items is None else target.items
            target.items.extend(zip(flat[::2], flat[1::2], strict=True))
        else:
            raise self.problem("broken", f"broken: sets items of {type(target).__name__}")
