"""What the `.metadata` of a torch.distributed.checkpoint directory says: which item lies where.

Owns the shape of that pickle: a Metadata with state_dict_metadata (names, shapes, chunks) and storage_data (file, offset
and length of each item). Must not open files, and must not go through a value more often than its bounds say: one list of
a hostile pickle can stand for many. Items are told apart by texts, since the hash of a tuple can be met on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec

from ckpt_supervisor.store.formats.structure import Damage
from ckpt_supervisor.store.pickled import Call, Global, PickleProblem, read_pickle
from ckpt_supervisor.store.verdict import Verdict

CHUNKS_MAX = 1_000_000
DIMENSIONS_MAX = 64
NAME_CHARACTERS_MAX = 16_384
PATH_CHARACTERS_MAX = 4096
_NUMBER_MAX = 2**63
_SHOWN_CHARACTERS = 200

_ELEMENT_BITS = re.compile(r"[a-z]+([0-9]+)")


class Item(msgspec.Struct, frozen=True):
    """One entry of storage_data: bytes [offset, offset + length) of a file.

    `tensor_bytes`: of the tensor's chunk itself; None if it is no tensor, or of a type of unknown size. `is_plain`: no
    extension has compressed it.
    """

    name: str
    path: str
    offset: int
    length: int
    is_tensor: bool
    tensor_bytes: int | None
    is_plain: bool


class Listing(msgspec.Struct, frozen=True):
    """All items, and the first few names of state_dict_metadata for which there is none."""

    items: tuple[Item, ...]
    lacking: tuple[str, ...]


LACKING_MAX = 20


class Unfamiliar(Exception):
    """A Metadata of another storage than torch's files."""


def read_listing(data: bytes) -> Listing:
    """What these bytes list. Raises Damage, or Unfamiliar."""
    try:
        value, end = read_pickle(data, nesting_max=None)
    except PickleProblem as error:
        verdict = {"cut": Verdict.TRUNCATED, "broken": Verdict.CORRUPT, "bounds": Verdict.FOREIGN}[error.kind]
        raise Damage(verdict, error.offset, error.reason) from error
    if end != len(data):
        raise Damage(Verdict.CORRUPT, end, f"{len(data) - end} bytes after the end of the pickle")
    # By what it holds and not by its class: Megatron's forks save a subclass of torch's.
    if type(value) is not Call or type(value.func) is not Global or type(value.state) is not dict:
        raise Damage(Verdict.CORRUPT, None, "it is no Metadata")
    state = value.state
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if type(described) is not dict:
        raise Damage(Verdict.CORRUPT, None, "it describes no tensors")
    if type(stored) is not dict or any(type(info) is not Call for info in stored.values()):
        raise Unfamiliar
    tensors = _Tensors(described)
    found: dict[str, dict[str, Item]] = {}
    for key, info in stored.items():
        index = _state(key, "MetadataIndex")
        name, place = _text(index.get("fqn"), NAME_CHARACTERS_MAX), _place(index.get("offset"))
        below = found.setdefault(name, {})
        if place in below:
            raise Damage(Verdict.CORRUPT, None, f"it lists {name[:_SHOWN_CHARACTERS]} twice")
        below[place] = _item(name, info, name in tensors.chunks, tensors.bytes_of(name, place))
    items = tuple(item for below in found.values() for item in below.values())
    return Listing(items, tuple(tensors.lacking(found)))


def _item(name: str, info: Any, is_tensor: bool, tensor_bytes: int | None) -> Item:
    state = _state(info, "_StorageInfo")
    path, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
    transforms = state.get("transform_descriptors")
    path = _text(path, PATH_CHARACTERS_MAX)
    return Item(name[:_SHOWN_CHARACTERS], path, _number(offset), _number(length), is_tensor, tensor_bytes, not transforms)


class _Tensors:
    """The tensors that state_dict_metadata describes: bytes of each chunk, by name and place."""

    def __init__(self, described: dict[Any, Any]) -> None:
        self._others: list[str] = []
        self.chunks: dict[str, dict[str, int | None]] = {}
        left = CHUNKS_MAX
        for name, value in described.items():
            name = _text(name, NAME_CHARACTERS_MAX)  # noqa: PLW2901
            if not _is_made_by(value, "TensorStorageMetadata"):
                self._others.append(name)
                continue
            state = _state(value, "TensorStorageMetadata")
            chunks = state.get("chunks")
            if type(chunks) is not list:
                raise Damage(Verdict.CORRUPT, None, f"it lists no chunks of {name[:_SHOWN_CHARACTERS]}")
            left -= len(chunks)
            if left < 0:
                raise Damage(Verdict.FOREIGN, None, f"more than {CHUNKS_MAX} chunks of tensors are not read")
            element_bytes = _element_bytes(state.get("properties"))
            self.chunks[name] = dict(_chunk(chunk, element_bytes) for chunk in chunks)

    def bytes_of(self, name: str, place: str) -> int | None:
        """Bytes of a chunk, None if they are not known."""
        return self.chunks.get(name, {}).get(place)

    def lacking(self, found: dict[str, dict[str, Item]]) -> Iterator[str]:
        """Names, up to a number, of what is described and has no item."""
        left = LACKING_MAX
        for name, chunks in self.chunks.items():
            items = found.get(name, {})
            absent = [place for place in chunks if place not in items]
            if absent and not (len(chunks) == len(items) == 1 and "" in items):
                yield f"{name[:_SHOWN_CHARACTERS]} at [{absent[0][:_SHOWN_CHARACTERS]}]"
                left -= 1
            if left == 0:
                return
        yield from [name[:_SHOWN_CHARACTERS] for name in self._others if name not in found][:left]


def _chunk(chunk: Any, element_bytes: int | None) -> tuple[str, int | None]:
    state = _state(chunk, "ChunkStorageMetadata")
    sizes = _sizes(state.get("sizes"))
    if sizes is None:
        raise Damage(Verdict.CORRUPT, None, "a chunk of a tensor has no size")
    return _place(state.get("offsets")), None if element_bytes is None else prod(sizes) * element_bytes


def _element_bytes(properties: Any) -> int | None:
    """From the type of numbers, such as torch.bfloat16."""
    state = properties.state if type(properties) is Call else None
    kind = state[0] if type(state) is tuple and state else None
    if type(kind) is not Global or kind.module != "torch":
        return None
    if kind.name == "bool":
        return 1
    bits = _ELEMENT_BITS.fullmatch(kind.name)
    return int(bits[1]) // 8 if bits is not None and bits[1] in ("8", "16", "32", "64", "128") else None


def _place(value: Any) -> str:
    """A chunk's offset in the tensor as a text, "" if there is none."""
    if value is None:
        return ""
    sizes = _sizes(value)
    if sizes is None:
        raise Damage(Verdict.CORRUPT, None, "a chunk of a tensor has no place")
    return ",".join(map(str, sizes))


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A torch.Size."""
    if type(value) is Call and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not tuple or len(value) > DIMENSIONS_MAX:
        return None
    return tuple(map(_number, value))


def _is_made_by(value: Any, name: str) -> bool:
    return type(value) is Call and type(value.func) is Global and value.func.name == name


def _state(value: Any, name: str) -> dict[Any, Any]:
    """The attributes of an object of this class."""
    if not _is_made_by(value, name) or type(value.state) is not dict:
        raise Damage(Verdict.CORRUPT, None, f"something in it is no {name}")
    return value.state


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_MAX:
        raise Damage(Verdict.CORRUPT, None, "a number in it is none")
    return value


def _text(value: Any, most: int) -> str:
    if type(value) is not str:
        raise Damage(Verdict.CORRUPT, None, "a name in it is none")
    if len(value) > most:
        raise Damage(Verdict.FOREIGN, None, f"a name in it has more than {most} characters")
    return value
