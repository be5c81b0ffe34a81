"""An immutable map from small numbers (ranks, tasks) to entries, changed one entry at a time without copying all of it.

Pure. Why not a tuple or a dict: with 16,384 ranks each of their words changes one entry, and a copy of the whole table for each
word is quadratic. Two levels of plain dicts copy about 200 entries a change at that size. It iterates in the order of the
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

BUCKET_BITS = 6
"""Numbers a bucket: 64."""

T = TypeVar("T")


class Table(Generic[T]):
    """Entries by number. `put` gives a new table; the old one stays as it is."""

    __slots__ = ("_buckets", "_count")
    __hash__ = None  # type: ignore[assignment]  # Compared by content, as a dict is.

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        buckets = self._buckets
        for high in sorted(buckets):
            bucket = buckets[high]
            for number in sorted(bucket):
                yield bucket[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._buckets == other._buckets

    def __repr__(self) -> str:
        return f"Table({list(self)!r})"

    @classmethod
    def of(cls, entries: Iterable[tuple[int, T]]) -> Table[T]:
        """A table of these numbers and entries, made in one go."""
        made: Table[T] = cls()
        for number, entry in entries:
            made._buckets.setdefault(number >> BUCKET_BITS, {})[number] = entry
        made._count = sum(map(len, made._buckets.values()))
        return made

    def get(self, number: int) -> T | None:
        """The entry of this number, None if there is none."""
        bucket = self._buckets.get(number >> BUCKET_BITS)
        return None if bucket is None else bucket.get(number)

    def put(self, number: int, entry: T) -> Table[T]:
        """The table with this entry added or replaced."""
        high = number >> BUCKET_BITS
        bucket = self._buckets.get(high)
        changed: Table[T] = Table()
        changed._buckets = {**self._buckets, high: {number: entry} if bucket is None else {**bucket, number: entry}}
        changed._count = self._count + (bucket is None or number not in bucket)
        return changed
