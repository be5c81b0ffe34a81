"""What a pickle says, read without doing anything of what it says.

Owns the opcodes of protocols 0 to 5 and what they build: plain data, and stubs for the rest. Must not import, call or
look up anything that a pickle names: what would be imported becomes a Global, what would be called a Call, and what
lives outside the pickle a Persistent. pickle.Unpickler is no way to do this, also with find_class overridden: its C
half allocates by the largest memo index that it is told (LONG_BINPUT 0xFFFFFFFF: gigabytes), and a tuple of tuples as a
dict key is hashed once for every way through it. Here every count has a bound (pickle_machine.py), nothing is allocated
before its bytes are there, and only keys whose hash is cheap and even are hashed.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt_supervisor.store.pickle_machine import (
    BYTES_MAX,
    CONTAINER_BYTES,
    LONG_BYTES_MAX,
    NESTING_MAX,
    Call,
    Global,
    Key,
    Machine,
    Persistent,
    PickleProblem,
)

__all__ = ["BYTES_MAX", "Call", "Global", "Key", "Persistent", "PickleProblem", "read_pickle"]

_PROTOCOL_MAX = 5
_SET_BYTES = 224


def read_pickle(
    data: bytes, offset: int = 0, persistent: list[Any] | None = None, nesting_max: int | None = NESTING_MAX
) -> tuple[Any, int]:
    """The value of the pickle that starts there, and the offset behind it. Raises PickleProblem.

    `persistent` gets every persistent id in the order in which they are met. `nesting_max`: None for a caller that goes
    down a known number of levels only; the check costs a third of the reading.
    """
    machine = Machine(data, offset, _OPERATIONS)
    try:
        value = machine.run()
    except UnicodeDecodeError as error:
        raise machine.problem("broken", "broken: a text is no text") from error
    except (IndexError, ValueError, TypeError) as error:
        raise machine.problem("broken", "broken: an opcode does not find what it needs") from error
    if persistent is not None:
        persistent.extend(machine.persistent)
    if nesting_max is not None:
        _check_nesting(value, offset, nesting_max)
    return value, machine.at


def _check_nesting(value: Any, offset: int, most: int) -> None:
    """Every way down is at most so long. A value that holds itself ends the way there."""
    heights: dict[int, int] = {id(value): 0}
    path: list[tuple[int, Iterator[Any]]] = [(id(value), iter(_within(value, type(value))))]
    while path:
        above, inside = path[-1]
        for item in inside:
            kind = type(item)
            if kind in _ATOMS:
                continue
            if len(path) + heights.get(id(item), 0) >= most:
                raise PickleProblem("bounds", offset, f"a pickle of values more than {most} deep")
            if id(item) not in heights:
                heights[id(item)] = 0
                path.append((id(item), iter(_within(item, kind))))
                break
            heights[above] = max(heights.get(above, 0), heights[id(item)] + 1)
        else:
            path.pop()
            if path:
                heights[path[-1][0]] = max(heights.get(path[-1][0], 0), heights[above] + 1)


_ATOMS = frozenset({str, int, bool, float, bytes, type(None), Global})


def _within(item: Any, kind: type) -> Iterable[Any]:
    if kind is dict:
        return (*item.values(), *(key for key in item if type(key) not in _ATOMS))
    if kind is Call:
        return (item.func, item.args, item.state, *(item.items or ()))
    if kind is Persistent or kind is Key:
        return (item.value,)
    return () if kind in _ATOMS else item  # a tuple, a list, a set


def _proto(machine: Machine) -> None:
    if machine.number(1) > _PROTOCOL_MAX:
        raise machine.problem("broken", "broken: an unknown protocol")


def _frame(machine: Machine) -> None:
    length = machine.number(8)
    if machine.at + length > machine.end:
        raise machine.cut()


def _pop(machine: Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _triple(machine: Machine) -> None:
    last = machine.stack.pop()
    second = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], second, last)
    machine.spent += CONTAINER_BYTES + 24


def _pair(machine: Machine) -> None:
    last = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], last)
    machine.spent += CONTAINER_BYTES + 16


def _tuple_above_mark(machine: Machine) -> None:
    found = tuple(machine.above_mark())
    machine.push(found, CONTAINER_BYTES + 8 * len(found))


def _list_above_mark(machine: Machine) -> None:
    found = machine.above_mark()
    machine.push(found, CONTAINER_BYTES + 8 * len(found))


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def _new(kind: Callable[[], Any], cost: int = CONTAINER_BYTES) -> Callable[[Machine], None]:
    return lambda machine: machine.push(kind(), cost)


def _signed(machine: Machine) -> None:
    machine.push(int.from_bytes(machine.take(4), "little", signed=True))


def _long(length_bytes: int) -> Callable[[Machine], None]:
    def make(machine: Machine) -> None:
        length = machine.number(length_bytes)
        if length > LONG_BYTES_MAX:
            raise machine.problem("bounds", f"an integer of more than {LONG_BYTES_MAX} bytes")
        machine.push(int.from_bytes(machine.take(length), "little", signed=True), CONTAINER_BYTES + length)

    return make


def _int_line(machine: Machine) -> None:
    line = machine.line().removesuffix(b"L")
    if len(line) > LONG_BYTES_MAX:
        raise machine.problem("bounds", f"an integer of more than {LONG_BYTES_MAX} digits")
    machine.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line), CONTAINER_BYTES + len(line))


def _string_line(machine: Machine) -> None:
    line = machine.line().strip()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise machine.problem("broken", "broken: a string without quotes")
    machine.push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"), CONTAINER_BYTES + len(line))


def _unicode_line(machine: Machine) -> None:
    line = machine.line()
    machine.push(line.decode("raw-unicode-escape"), CONTAINER_BYTES + 4 * len(line))


def _text(length_bytes: int) -> Callable[[Machine], None]:
    return lambda machine: machine.text(length_bytes)


def _raw(length_bytes: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.raw(length_bytes))


def _old_text(length_bytes: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.raw(length_bytes).decode("latin-1"))


def _append(machine: Machine) -> None:
    value = machine.stack.pop()
    machine.extend([value])


def _extend(machine: Machine) -> None:
    machine.extend(machine.above_mark())


def _set_item(machine: Machine) -> None:
    pair = [machine.stack[-2], machine.stack[-1]]
    del machine.stack[-2:]
    machine.assign(pair)


def _set_items(machine: Machine) -> None:
    machine.assign(machine.above_mark())


def _dict_above_mark(machine: Machine) -> None:
    flat = machine.above_mark()
    machine.push({}, CONTAINER_BYTES)
    machine.assign(flat)


def _set_above_mark(machine: Machine) -> None:
    values = machine.above_mark()
    machine.push(set(), _SET_BYTES)
    machine.extend(values)


def _global(machine: Machine) -> None:
    module, name = machine.line().decode(), machine.line().decode()
    machine.push(Global(module, name), CONTAINER_BYTES + 4 * (len(module) + len(name)))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise machine.problem("broken", "broken: a name that is no text")
    machine.push(Global(module, name), CONTAINER_BYTES)


def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    func = machine.stack.pop()
    if type(args) is not tuple:
        raise machine.problem("broken", "broken: a call whose arguments are no tuple")
    machine.call(func, args)


def _new_object_ex(machine: Machine) -> None:
    names, args, func = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.call(func, (args, names))


def _object_above_mark(machine: Machine) -> None:
    func, *args = machine.above_mark()
    machine.call(func, tuple(args))


def _instance_above_mark(machine: Machine) -> None:
    args = machine.above_mark()
    _global(machine)
    machine.call(machine.stack.pop(), tuple(args))


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is not Call or target.state is not None:
        raise machine.problem("broken", "broken: a state for what has none")
    target.state = state


def _persistent(machine: Machine) -> None:
    _push_persistent(machine, machine.stack.pop())


def _persistent_line(machine: Machine) -> None:
    _push_persistent(machine, machine.line().decode())


def _push_persistent(machine: Machine, value: Any) -> None:
    machine.persistent.append(value)
    machine.push(Persistent(value), CONTAINER_BYTES)


def _outside(machine: Machine) -> None:
    raise machine.problem("bounds", "a pickle that needs a registry or buffers from elsewhere")


_OPERATIONS: dict[int, Callable[[Machine], None]] = {
    0x80: _proto,
    0x95: _frame,
    ord("0"): _pop,
    ord("1"): lambda machine: machine.above_mark().clear(),
    ord("2"): lambda machine: machine.stack.append(machine.stack[-1]),
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("I"): _int_line,
    ord("L"): _int_line,
    ord("J"): _signed,
    ord("K"): lambda machine: machine.stack.append(machine.number(1)),
    ord("M"): lambda machine: machine.push(machine.number(2)),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("F"): lambda machine: machine.push(float(machine.line())),
    ord("G"): lambda machine: machine.push(struct.unpack(">d", machine.take(8))[0]),
    ord("S"): _string_line,
    ord("T"): _old_text(4),
    ord("U"): _old_text(1),
    ord("V"): _unicode_line,
    ord("X"): _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    ord("B"): _raw(4),
    ord("C"): _raw(1),
    0x8E: _raw(8),
    0x96: _raw(8),
    ord("]"): _new(list),
    ord("l"): _list_above_mark,
    ord("a"): _append,
    ord("e"): _extend,
    ord("t"): _tuple_above_mark,
    0x86: _pair,
    0x87: _triple,
    ord("}"): _new(dict),
    ord("d"): _dict_above_mark,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x8F: _new(set, _SET_BYTES),
    0x90: _extend,
    0x91: _set_above_mark,
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _reduce,
    0x92: _new_object_ex,
    ord("o"): _object_above_mark,
    ord("i"): _instance_above_mark,
    ord("b"): _build,
    ord("P"): _persistent_line,
    ord("Q"): _persistent,
    ord("g"): lambda machine: machine.get(int(machine.line())),
    ord("h"): lambda machine: machine.get(machine.number(1)),
    ord("j"): lambda machine: machine.get(machine.number(4)),
    ord("p"): lambda machine: machine.put(int(machine.line())),
    ord("q"): lambda machine: machine.put(machine.number(1)),
    ord("r"): lambda machine: machine.put(machine.number(4)),
    0x94: lambda machine: machine.put(len(machine.memo) + len(machine.far)),
    0x82: _outside,
    0x83: _outside,
    0x84: _outside,
    0x97: _outside,
    0x98: _outside,
}
"""By the byte in the file; Python's pickletools describes each."""
