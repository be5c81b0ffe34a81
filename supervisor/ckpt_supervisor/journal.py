"""temporary, to be replaced"""
from __future__ import annotations
import json, os, time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
class Journal:
    def __init__(self, directory: Path, job: str, attempt: int, step_id: str, epoch: int, task: int) -> None:
        self.path = directory / f"{job}-{attempt}-{step_id}-{epoch}-{task}.jsonl"
        self.ids = {"job": job, "attempt": attempt, "step_id": step_id, "epoch": epoch, "task": task}
        self.fd = -1
    def open(self) -> str:
        self.path.parent.mkdir(exist_ok=True)
        self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return ""
    def stamp(self) -> tuple[str, int]:
        return datetime.now(timezone.utc).isoformat(timespec="microseconds"), time.monotonic_ns() // 1000000
    def write(self, event: str, level: str, stamp: tuple[str, int], fields: dict[str, Any]) -> None:
        os.write(self.fd, (json.dumps({"ts": stamp[0], "mono_ms": stamp[1], "event": event, "level": level, **self.ids, **fields}) + "\n").encode())
