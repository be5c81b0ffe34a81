"""A run that never was: attempts with all causes, saves, late ranks, memory; for the views, which draw what they are given.

Owns made-up facts in the shape of view/facts.py. `words` puts a text of one's own wherever a journal could hold one.
"""

from __future__ import annotations

import random

from ckpt_supervisor.view.facts import Attempt, Commit, Notice, Round, Run, Span, Word

CAUSES = (
    "preempted", "end of the time limit ahead", "node failure", "training failed", "training hung", "time limit reached",
    "cancelled", "asked to leave", "lost without a word", "requeued already", "signal", "finished",
)  # fmt: skip
BEGIN_NS = 1_769_860_800 * 10**9
"""2026-01-31 12:00 UTC."""

_S = 10**9


def made(attempts: int = 12, ranks: int = 16, saves: int = 8, words: str = "") -> Run:
    """A run of so many attempts, the same for the same numbers."""
    chance = random.Random(7)
    found: list[Attempt] = []
    at, kept = BEGIN_NS, 0
    for number in range(attempts):
        cause = "finished" if number == attempts - 1 else CAUSES[number % (len(CAUSES) - 1)]
        one = _attempt(chance, (number, at, kept), (ranks, saves), words or cause)
        one.cause = words or cause
        found.append(one)
        at = (one.ended_ns or at) + chance.randrange(30, 4_000) * _S
        kept = one.kept or 0
    notes = ("node-3's clock is 92 s behind; its lines were moved.", *([words] if words else []))
    return Run(directory=words or "/scratch/anna/run7/checkpoints", attempts=tuple(found), now_ns=at, notes=notes)


def _attempt(chance: random.Random, where: tuple[int, int, int], sizes: tuple[int, int], text: str) -> Attempt:
    number, began, kept = where
    ranks, saves = sizes
    step, at = kept, began + 40 * _S
    spans = [Span("queued", began - chance.randrange(5, 900) * _S, began), Span("starting", began, at)]
    commits, rounds, progress = [], [], [(at, step)]
    for save in range(1, saves + 1):
        trained = chance.randrange(300, 900)
        progress += [(at + trained * _S * part // 5, step + trained * part // 5) for part in range(1, 6)]
        step += trained
        spans.append(Span("training", at, at + trained * _S))
        at += trained * _S
        agree, arrive = chance.randrange(5, 90), chance.randrange(50, 2_500)
        write, verify = chance.randrange(4_000, 30_000), chance.randrange(1_000, 9_000)
        took = (agree + arrive + write + verify) * 10**6
        is_done = chance.random() > 0.15
        last = tuple(
            _word(chance, rank, agree, arrive, write, text if not is_done and rank == 3 else "") for rank in range(ranks)
        )
        kind = "save and leave" if save == saves else "periodic"
        rounds.append(
            Round(
                save,
                kind,
                at,
                at + took,
                step,
                is_done,
                "" if is_done else text,
                agree,
                arrive,
                write,
                verify,
                last if save > saves - 4 else (),
            )
        )
        spans.append(Span("saving", at, at + took))
        at += took
        if is_done:
            commits.append(
                Commit(at, step, save, kind, write, took // 10**6, verify, 7 * 10**9, "full" if save % 3 else "structure")
            )
    lost = step - (commits[-1].step if commits else kept)
    if lost:
        spans.append(Span("lost", at, at + lost * _S))
        at += lost * _S
    spans.append(Span("leaving", at, at + 9 * _S))
    at += 9 * _S
    memory = _memory(chance, began, at)
    marks = _marks(number, (began, at), text)
    hosts = tuple(f"node-{index}" for index in range(4))
    return Attempt(
        job=text if len(text) > 40 else "4711", attempt=number, epoch=number + 1, step_id="0", host=f"node-{number % 5}",
        tasks=4, tasks_told=4, hosts=hosts, world_size=ranks, began_ns=began, ended_ns=at, spans=tuple(spans),
        marks=tuple(marks), notice=Notice(at - 60 * _S, "SIGTERM", text, 60_000), resume_step=kept if number else -1,
        commits=tuple(commits), rounds=tuple(rounds), progress=tuple(progress), memory=memory, reached=step + lost,
        is_exact=number % 2 == 0, kept=commits[-1].step if commits else kept, lost_steps=lost, lost_ms=lost * 1_000,
        out_ms=41_000, code=75, saves=len(commits), failed_saves=len(rounds) - len(commits), detail=text[:40],
        line=f"{text}: saved step {step}, requeued", requeue="accepted", notes=("1 line is damaged",) if number == 2 else (),
    )  # fmt: skip


def _memory(chance: random.Random, began: int, ended: int) -> tuple[tuple[int, int, int], ...]:
    """Of four nodes, each with the same limit; it grows."""
    instants = [(part, began + (ended - began) * part // 30) for part in range(31)]
    return tuple((at, int(1.6e12 + 3.2e11 * part / 30 + chance.random() * 1.2e11), 549_755_813_888) for part, at in instants)


def _marks(number: int, when: tuple[int, int], text: str) -> list[tuple[int, str, str]]:
    began, ended = when
    marks = [(ended - 60 * _S, "notice", text), (ended - 9 * _S, "requeue", "accepted")]
    return [*marks, (began + 900 * _S, "hang", text)] if number % 4 == 3 else marks


def _word(chance: random.Random, rank: int, agree: int, arrive: int, write: int, problem: str) -> Word:
    late = chance.randrange(0, 400) + (3_000 if rank == 5 else 0)
    if problem:
        return Word(rank, agree, agree + arrive, None, None, problem)
    return Word(rank, agree, agree + arrive, agree + arrive + write + late, write + late)
