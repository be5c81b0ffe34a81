"""Who stands still: the rules of the detector one by one, and what the watch makes of them between supervisors."""

from __future__ import annotations

from typing import Any

from ckpt_client import wire
from ckpt_client.wire import Position, Progress, Who
from ckpt_supervisor.core.hangs import FIRST_MS, SAMPLE_MS, Detector, Doing, Stall
from ckpt_supervisor.watches import dumps, standing
from ckpt_supervisor.watches.hangs import text_of
from ckpt_supervisor.watches.standing import Way

FLOOR_MS = 300_000
EVERY_MS = wire.progress_ms(FLOOR_MS)
LEAST_MS = FLOOR_MS - EVERY_MS - SAMPLE_MS
BUSY_MS = 1_800_000


class Story:
    """A detector and its clock; each rank says a word every five seconds."""

    def __init__(self, ranks: int = 1) -> None:
        self.detector = Detector(FLOOR_MS)
        self.now = 1_000_000
        self.steps = dict.fromkeys(range(ranks), 0)
        self.mute: set[int] = set()
        for rank in self.steps:
            self.say(rank, "starting", n=0)
        for _ in range(3):
            self.train(1_000)

    def say(self, rank: int, doing: Any = "training", *, n: int | None = None, k: int = 0, **more: Any) -> bool:
        """One word of one rank."""
        self.steps[rank] = self.steps[rank] if n is None else n
        at = Position(self.steps[rank], k)
        return self.detector.heard(Progress(Who(rank, more.pop("generation", 0), 100 + rank), at, doing, **more), self.now)

    def train(self, step_ms: int, *ranks: int) -> None:
        """One step of all ranks, or of these, of so many milliseconds; words come meanwhile."""
        self.wait(step_ms)
        for rank in ranks or tuple(self.steps):
            self.say(rank, n=self.steps[rank] + 1)

    def wait(self, ms: int, **doing: Any) -> tuple[Stall, ...]:
        """Let time pass, in which nobody moves, up to the first stall; `doing` holds the words of ranks by `r0`, `r1`."""
        end = self.now + ms
        while self.now < end:
            self.now = min(self.now + EVERY_MS, end)
            for rank in self.steps.keys() - self.mute:
                self.say(rank, *doing.get(f"r{rank}", ("training",)))
            if stalls := self.detector.look(self.now):
                return stalls
        return ()


def test_a_rank_stands_still_after_the_floor_and_three_slow_steps() -> None:
    """Fast steps: the floor alone. After some of 20 s a minute more."""
    story = Story()
    assert story.wait(LEAST_MS - 2 * EVERY_MS) == ()
    assert [stall.slow_ms for stall in story.wait(FLOOR_MS)] == [0]
    slow = Story()
    for _ in range(5):
        slow.train(20_000)
    (stall,) = slow.wait(2 * FLOOR_MS)
    assert 18_000 <= stall.slow_ms <= 20_000
    assert stall.limit_ms == LEAST_MS + 3 * stall.slow_ms


def test_a_slow_step_is_forgotten_after_two_windows() -> None:
    """An evaluation that no phase announces counts as a slow step; not for ever."""
    story = Story()
    story.train(200_000)
    for _ in range(220):
        story.train(60_000)
    (stall,) = story.wait(20 * FLOOR_MS)
    assert 55_000 <= stall.slow_ms < 70_000


def test_the_first_step_has_an_hour() -> None:
    """Compilers and caches; but not for ever: a collective that never begins is the most common hang of all."""
    story = Story.__new__(Story)
    story.detector, story.now, story.steps, story.mute = Detector(FLOOR_MS), 0, {0: 0}, set()
    story.say(0, "starting", n=0)
    story.say(0, n=1)
    assert story.wait(FIRST_MS - 2 * EVERY_MS) == ()
    assert story.wait(FIRST_MS)


def test_a_phase_has_an_allowance_until_it_is_known() -> None:
    """Half an hour, three times over; then the floor and three times what it took."""
    story = Story()
    for _ in range(3):
        assert story.wait(FLOOR_MS * 2, r0=("phase",)) == ()
        story.train(1_000)
    (stall,) = story.wait(10 * BUSY_MS, r0=("phase",))
    assert stall.limit_ms == LEAST_MS + 3 * stall.slow_ms
    assert stall.at == "at step 6 in the phase ''"


def test_a_save_and_a_parked_rank_are_left_to_the_machine() -> None:
    """A save has half an hour; one that is parked is not judged, as long as it is heard."""
    story = Story()
    assert story.wait(FIRST_MS * 3, r0=("parked",)) == ()
    assert story.wait(BUSY_MS - 2 * EVERY_MS, r0=("saving",)) == ()
    assert story.wait(BUSY_MS, r0=("saving",))
    story = Story()
    story.say(0, "parked")
    story.mute = {0}
    assert story.wait(2 * BUSY_MS), "it was stopped there, for example"


def test_who_waits_for_a_busy_rank_is_excused_and_who_is_behind_it_is_not() -> None:
    """Rank 0 evaluates alone: rank 1 is at the next step already and waits; or it never came to the end of this one."""
    story = Story(2)
    assert story.wait(BUSY_MS - 2 * EVERY_MS, r0=("phase",)) == ()
    assert story.wait(LEAST_MS - 2 * EVERY_MS) == (), "from then on it has its own time again"
    behind = Story(2)
    behind.say(0, n=behind.steps[0] + 1)
    (stall,) = behind.wait(BUSY_MS, r0=("phase",))
    assert stall.who.rank == 1


def test_ranks_in_the_same_phase_do_not_excuse_each_other() -> None:
    """A deadlock in an evaluation of all ranks is found after its own allowance."""
    story = Story(2)
    assert story.wait(BUSY_MS - 2 * EVERY_MS, r0=("phase",), r1=("phase",)) == ()
    assert len(story.wait(3 * EVERY_MS, r0=("phase",), r1=("phase",))) == 2


def test_ranks_of_other_tasks_excuse_as_those_of_this_one_do() -> None:
    """What the coordinator passes on."""
    story = Story()
    busy = Doing("saving", "", Position(story.steps[0], 0))
    for _ in range(200):
        assert story.wait(EVERY_MS) == ()
        story.detector.excuse((busy,), story.now)
    ahead = Doing("saving", "", Position(story.steps[0] + 1, 0))
    for _ in range(LEAST_MS // EVERY_MS - 1):
        assert story.wait(EVERY_MS) == ()
        story.detector.excuse((ahead,), story.now)
    assert story.wait(2 * EVERY_MS)


def test_a_rank_that_is_silent_is_judged_from_its_last_word_on() -> None:
    """C code that holds the interpreter."""
    story = Story()
    story.mute = {0}
    assert story.wait(LEAST_MS - 2 * EVERY_MS) == ()
    (stall,) = story.wait(FLOOR_MS)
    assert stall.silent_ms >= LEAST_MS


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    """scontrol suspend stops the ranks as well."""
    story = Story()
    story.wait(LEAST_MS // 2)
    story.now += 10 * FLOOR_MS
    assert story.wait(LEAST_MS // 2 - 2 * EVERY_MS) == ()
    assert story.wait(FLOOR_MS)


def test_a_hang_is_told_once_and_its_end_is_seen() -> None:
    """Only a move makes it new; and what it took does not make the next limit hours."""
    story = Story()
    (stall,) = story.wait(FLOOR_MS)
    story.detector.tell(stall.who)
    story.now += EVERY_MS
    assert story.detector.is_told(stall.who)
    assert not story.say(0)
    for _ in range(1_000):
        story.wait(EVERY_MS)
    assert story.say(0, n=story.steps[0] + 1)
    assert not story.detector.is_told(stall.who)
    (again,) = story.wait(100 * FLOOR_MS)
    assert again.limit_ms <= 4 * FLOOR_MS


def test_another_start_and_another_generation_begin_anew() -> None:
    """A new process has a first step again; ranks of older generations are forgotten, and so is who has left its loop."""
    story = Story(2)
    story.say(0, "starting", n=0, generation=1)
    assert [word.who for word in story.detector.words()] == [Who(0, 1, 100)]
    story.say(1, n=5)
    assert len(story.detector.words()) == 1, "its time is over"
    story.say(0, "over", generation=1)
    assert story.detector.words() == ()


def test_the_rank_that_the_others_wait_for_comes_first_in_the_line() -> None:
    """One line for people, with the numbers."""
    one = Stall(Who(0, 0, 7), Position(12, 0), "training", "", 312_000, 306_000, 2_000, 100)
    two = Stall(Who(1, 0, 8), Position(12, 0), "starting", "", 300_000, 306_000, 2_000, 100)
    assert text_of([(two, Way(standing.STOPPED, "is stopped (SIGSTOP)")), (one, Way(standing.NO_PROGRESS, "answers"))]) == (
        "training seems to hang: no progress for 312 s (306 s are allowed, as slow steps take 2.0 s): "
        "rank 1 before its first step is stopped (SIGSTOP); rank 0 at step 12 answers"
    )


def test_words_of_progress_are_asked_for_as_often_as_the_floor_needs_them() -> None:
    """Never where nobody looks."""
    assert [wire.progress_ms(floor) for floor in (None, 1_000, 20_000, 300_000)] == [0, 200, 2_000, 5_000]


def test_the_main_thread_comes_first_and_a_dump_fits_into_a_line() -> None:
    """faulthandler writes it last, and 100 threads of 100 frames would fill ten lines."""
    text = "Thread 0x1 (most recent call first):\n  File a\n\nCurrent thread 0x2 (most recent call first):\n  File b\n"
    assert dumps.main_first(text).startswith("Current thread 0x2 (most recent call first):\n  File b\nThread 0x1")
    assert len(dumps.cut("x" * 100_000)) < 7_600
    assert dumps.cut("short") == "short"


def test_nobody_is_excused_for_a_rank_whose_process_is_gone() -> None:
    """Rank 0 is killed in the middle of its evaluation: the others wait in vain, and not for half an hour more."""
    story = Story(2)
    story.say(0, "phase", k=1, phase="eval")
    assert story.wait(2 * FLOOR_MS, r0=("phase",)) == ()
    story.mute = {0}
    story.wait(4 * EVERY_MS)
    assert story.detector.silent(story.now) == (Who(0, 0, 100),)
    story.detector.ended(Who(0, 0, 100))
    assert story.detector.silent(story.now) == ()
    assert story.detector.busy(story.now) == ()
    assert story.wait(FLOOR_MS)
    assert {stall.who.rank for stall in story.detector.near(story.now)} == {0, 1}
