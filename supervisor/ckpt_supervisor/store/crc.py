"""CRC32 of a buffer, and of two neighbours from their own CRC32s.

Owns the choice of implementation: ISA-L's (2 to 4 times zlib's speed, and it frees the GIL), or zlib where there is no
wheel of it. Must not read files. `combine` lets threads take the blocks of one record in any order.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_CACHED_LENGTHS_MAX = 4096


def combine_plain(first: int, second: int, second_length: int) -> int:
    """CRC32 of two neighbouring pieces in plain Python (zlib has it in C, but Python's zlib does not offer it)."""
    return _multiply(_shift_by(second_length), first) ^ second


@lru_cache(maxsize=_CACHED_LENGTHS_MAX)
def _shift_by(length: int) -> int:
    """x to the power of 8 * length, modulo the polynomial, in the reflected order of bits that CRC32 uses."""
    result, square, bits = _ONE, _ONE >> 1, 8 * length
    while bits:
        if bits & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        bits >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """a times b modulo the polynomial."""
    product, mask = 0, _ONE
    while mask:
        if a & mask:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        mask >>= 1
    return product


def _implementation() -> tuple[Callable[[memoryview], int], Callable[[int, int, int], int]]:
    try:
        isal_zlib = importlib.import_module("isal.isal_zlib")
    except ImportError:  # no wheel for this machine
        return zlib.crc32, combine_plain
    return isal_zlib.crc32, getattr(isal_zlib, "crc32_combine", combine_plain)  # older ones lack the second


crc32, combine = _implementation()
"""CRC32 of a buffer; CRC32 of two neighbouring pieces, from the CRC32 of each and the length of the second."""
