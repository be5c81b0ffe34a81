"""The saves of one attempt, put together from the lines that tell of them.

Owns how a round's lines become a Round and a Commit. Pure. Must not know time spent or steps lost (telling.py). A round of which
lines are missing is told as far as they go: one without an end has `end_ns` None.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ckpt_supervisor.view.facts import WORDS_ROUNDS_MAX, Commit, Round, Word
from ckpt_supervisor.view.values import number, ranks_of, text

ROUNDS_MAX = 10_000
"""So many of the newest rounds of an attempt are kept; all are counted."""

RANKS_MAX = 4_096
STANDS = ("committed", "already there")
"""Results of a commit after which the step stands."""

_MS = 1_000_000
_PROBLEMS = {"rank_failed": "failed", "rank_late": "late", "rank_gone": "gone", "rank_finished": "finished"}
WORDS = frozenset({"rank_agreed", "rank_arrived", "rank_written", *_PROBLEMS})


class Open(msgspec.Struct):
    """A round that is being told of."""

    number: int
    kind: str
    begin_ns: int
    step: int | None = None
    agreed_ns: int | None = None
    go_ns: int | None = None
    written_ns: int | None = None
    is_committed: bool = False
    save_left_ms: int | None = None
    verify_ms: int | None = None
    bytes: int | None = None
    mode: str = ""
    words: dict[int, Word] = msgspec.field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """It is the save that the attempt leaves with."""
        return self.kind == "save and leave"


class Rounds:
    """All rounds of an attempt. `open`: the one that runs now."""

    def __init__(self) -> None:
        self.open: Open | None = None
        self.saves = 0
        self.failed = 0
        self.hold_ms = 0
        self.dropped = 0
        self._closed: list[Round] = []
        self._commits: list[Commit] = []
        self._words: dict[int, dict[int, Word]] = {}

    def take(self, event: str, line: dict[str, Any], at_ns: int) -> None:
        """One line more, of whatever event."""
        if event == "round_begun":
            self._close(None, False, "")
            self.open = Open(number(line.get("round")) or 0, text(line.get("kind")), at_ns)
            self.open.save_left_ms = number(line.get("save_left_ms"))
            return
        current = self.open
        if current is None or (line.get("round") is not None and line.get("round") != current.number):
            if event == "commit":
                self._commit(line, at_ns, None)
            return
        match event:
            case "round_turned":
                current.kind = text(line.get("kind")) or current.kind
            case "agreed":
                current.step, current.agreed_ns = number(line.get("step")), at_ns
            case "go":
                step = number(line.get("step"))
                current.go_ns, current.step = at_ns, current.step if step is None else step
            case "phase" if line.get("after") == "VERIFYING":
                current.written_ns = at_ns
            case "verified":
                current.mode = text(line.get("mode"))
                current.bytes = (current.bytes or 0) + max(0, number(line.get("bytes")) or 0)
            case "commit":
                self._commit(line, at_ns, current)
            case "round_committed":
                current.step = number(line.get("step")) if current.step is None else current.step
                self._close(at_ns, True, "")
            case "round_given_up":
                self._close(at_ns, False, text(line.get("reason")) or "no reason was told")
            case _:
                pass

    def word(self, event: str, line: dict[str, Any]) -> None:
        """How far ranks came in a round, by their own lines; of the newest rounds only these are asked for."""
        of = number(line.get("round"))
        if of is None or event not in WORDS:
            return
        words = self._words.setdefault(of, {})
        after_ms, reason = number(line.get("after_ms")), text(line.get("reason"))
        for rank in ranks_of(line, RANKS_MAX):
            if len(words) >= RANKS_MAX and rank not in words:
                return
            word = words.get(rank) or Word(rank)
            if event in _PROBLEMS:
                word = msgspec.structs.replace(word, problem=f"{_PROBLEMS[event]}: {reason}" if reason else _PROBLEMS[event])
            elif event == "rank_agreed":
                word = msgspec.structs.replace(word, agreed_ms=after_ms)
            elif event == "rank_arrived":
                word = msgspec.structs.replace(word, arrived_ms=after_ms)
            else:
                word = msgspec.structs.replace(word, written_ms=after_ms, save_ms=number(line.get("save_ms")))
            words[rank] = word

    def newest(self) -> frozenset[int]:
        """Numbers of the rounds whose words are wanted."""
        numbers = [one.number for one in self._closed[-WORDS_ROUNDS_MAX:]]
        return frozenset(numbers if self.open is None else [*numbers, self.open.number][-WORDS_ROUNDS_MAX:])

    def commits(self) -> tuple[Commit, ...]:
        """What was committed or adopted, in order."""
        return tuple(self._commits)

    def rounds(self) -> tuple[Round, ...]:
        """All of them; the last one may be open."""
        self._close(None, False, "")
        return tuple(
            msgspec.structs.replace(one, words=tuple(words for _, words in sorted(self._words[one.number].items())))
            if one.number in self._words
            else one
            for one in self._closed
        )

    def adopted(self, step: int, at_ns: int) -> None:
        """What the program wrote itself is a checkpoint now."""
        self._commits.append(Commit(at_ns, step, 0, "adopted"))
        del self._commits[:-ROUNDS_MAX]

    def _commit(self, line: dict[str, Any], at_ns: int, current: Open | None) -> None:
        step, hold_ms, save_ms = (number(line.get(key)) for key in ("step", "hold_ms", "save_ms"))
        verify_ms = number(line.get("verify_ms"))
        if current is not None:
            current.is_committed = line.get("result") in STANDS
            current.step = step if current.step is None else current.step
            current.verify_ms = verify_ms
            if current.written_ns is None and verify_ms is not None:
                current.written_ns = max(current.begin_ns, at_ns - verify_ms * _MS)
        if line.get("result") not in STANDS or step is None or step < 0:
            return
        kind, size, mode = ("", None, "") if current is None else (current.kind, current.bytes, current.mode)
        of = number(line.get("round")) or 0
        self._commits.append(Commit(at_ns, step, of, kind, save_ms, hold_ms, verify_ms, size, mode))
        del self._commits[:-ROUNDS_MAX]
        self.hold_ms += max(0, hold_ms or 0)

    def _close(self, at_ns: int | None, is_committed: bool, reason: str) -> None:
        current, self.open = self.open, None
        if current is None:
            return
        is_committed = is_committed or (current.is_committed and not reason)
        self.saves += is_committed
        self.failed += bool(reason)
        if reason and current.go_ns is not None and at_ns is not None:
            self.hold_ms += (at_ns - current.go_ns) // _MS
        agreed_ns = current.agreed_ns if current.kind != "periodic" else current.agreed_ns or current.begin_ns
        closed = Round(
            number=current.number,
            kind=current.kind,
            begin_ns=current.begin_ns,
            end_ns=at_ns,
            step=current.step,
            committed=is_committed,
            reason=reason,
            agree_ms=_between(current.begin_ns, agreed_ns),
            arrive_ms=_between(agreed_ns, current.go_ns),
            write_ms=_between(current.go_ns, current.written_ns),
            verify_ms=current.verify_ms,
        )
        self._closed.append(closed)
        if len(self._closed) > ROUNDS_MAX:
            self.dropped += 1
            del self._closed[0]


def _between(since_ns: int | None, until_ns: int | None) -> int | None:
    return None if since_ns is None or until_ns is None else max(0, until_ns - since_ns) // _MS
