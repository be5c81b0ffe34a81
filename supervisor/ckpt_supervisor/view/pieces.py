"""What an attempt spends its time with, as pieces that follow each other.

Owns the cutting: a turn ends the piece before it, and training that no checkpoint holds is cut out of the training as `lost`.
Pure. Must not know events; telling.py does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ckpt_supervisor.view.facts import Span


class Pieces:
    """The pieces of one attempt, told from its begin to its end."""

    def __init__(self) -> None:
        self._turns: list[tuple[int, str]] = []
        self._lost: list[tuple[int, int]] = []

    @property
    def kind(self) -> str:
        """What it does now; "" before it has begun."""
        return self._turns[-1][1] if self._turns else ""

    def turn(self, kind: str, at_ns: int) -> None:
        """From this instant on it does that. Before the last turn it cannot be: then from that one on."""
        if not self._turns or self._turns[-1][1] != kind:
            self._turns.append((max(at_ns, self._turns[-1][0]) if self._turns else at_ns, kind))

    def hold(self, since_ns: int, until_ns: int) -> None:
        """The save that ended then had held training since this instant already."""
        for place in range(len(self._turns) - 1, max(0, len(self._turns) - 4), -1):
            at_ns, kind = self._turns[place]
            if kind == "saving" and since_ns < at_ns <= until_ns:
                self._turns[place] = (max(since_ns, self._turns[place - 1][0]), kind)
                return

    def rename(self, before: str, after: str) -> None:
        """What was taken for one kind was another."""
        self._turns = [(at_ns, after if kind == before else kind) for at_ns, kind in self._turns]

    def again(self, before: str, after: str) -> None:
        """What it does now was not its end, as it had seemed."""
        if self.kind == before:
            at_ns, _ = self._turns.pop()
            self.turn(after, at_ns)

    def lose(self, since_ns: int, until_ns: int) -> None:
        """What was trained between these was for nothing."""
        if until_ns > since_ns:
            self._lost.append((since_ns, until_ns))

    def spans(self, end_ns: int) -> tuple[Span, ...]:
        """All of it, up to the attempt's end."""
        ends = [at_ns for at_ns, _ in self._turns[1:]] + [max(end_ns, self._turns[-1][0])] if self._turns else []
        found: list[Span] = []
        for (begin_ns, kind), until_ns in zip(self._turns, ends, strict=True):
            whole = Span(kind, begin_ns, until_ns)
            found += self._cut(whole) if kind == "training" else [whole]
        return tuple(_joined(span for span in found if span.end_ns > span.begin_ns))

    def _cut(self, span: Span) -> list[Span]:
        cuts = {span.begin_ns, span.end_ns}
        for since_ns, until_ns in self._lost:
            cuts |= {at_ns for at_ns in (since_ns, until_ns) if span.begin_ns < at_ns < span.end_ns}
        edges = sorted(cuts)
        kinds = [
            "lost" if any(since <= begin and end <= until for since, until in self._lost) else span.kind
            for begin, end in itertools.pairwise(edges)
        ]
        return [Span(kind, begin, end) for kind, begin, end in zip(kinds, edges[:-1], edges[1:], strict=True)]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one kind as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].kind == span.kind and found[-1].end_ns == span.begin_ns:
            found[-1] = Span(span.kind, found[-1].begin_ns, span.end_ns)
        else:
            found.append(span)
    return found


def milliseconds(spans: Iterable[Span], kind: str) -> int:
    """How long it did that, all together."""
    return sum(span.end_ns - span.begin_ns for span in spans if span.kind == kind) // 1_000_000
