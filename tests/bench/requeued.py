"""x"""
from __future__ import annotations
from tests.bench.figure import Row
def measure() -> list[Row]:
    return []
