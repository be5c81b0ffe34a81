"""The journal's lines for what the machine does: derived from (event, before, after), with the numbers it was decided on."""

from __future__ import annotations

from typing import Any

from ckpt_client import wire
from ckpt_client.wire import Position, SavedFile, Who
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.describe import Entry, describe
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.views import JobView, NoView

LOCAL = Policy(directory="/ckpt", epoch=4)
IN_SLURM = Policy(directory="/ckpt", epoch=4, slurm=True, can_look=True)
FILE = SavedFile("state.pt", 1_000, "ab")
VIEW = JobView("RUNNING", "None", 0, 900_000, None, None, requeue=True, batch=True, looked_ms=100_000, time_limit_unlimited=False)


def who(rank: int) -> Who:
    """Rank 0 is process 100, and so on."""
    return Who(rank, 0, 100 + rank)


class Story:
    """The real machine, fed by hand; keeps the lines of its last step and of all."""

    def __init__(self, policy: Policy, ranks: int = 0) -> None:
        self.policy = policy
        self.now = 1_000
        self.state, self.first = machine.start(policy, self.now)
        self.all: list[Entry] = []
        self.commands: tuple[do.Command, ...] = ()
        for rank in range(ranks):
            self.feed(wire.Hello(who(rank), wire.VERSION, ranks, rank, sharded=False))

    def feed(self, event: ev.Event, after_ms: int = 10) -> list[Entry]:
        """One event, so long after the last one; its lines."""
        self.now += after_ms
        before = self.state
        self.state, self.commands = machine.step(self.policy, before, event, self.now)
        lines = list(describe(event, before, self.state, self.commands, self.now))
        self.all += lines
        return lines

    def signal(self, name: str = "SIGTERM", meaning: ev.Meaning = ev.Meaning.LEAVE) -> list[Entry]:
        """A signal comes."""
        return self.feed(ev.SignalCame(name, meaning))

    def agree(self, n: int = 7) -> None:
        """All ranks answer, stand at step n, and get Go."""
        number = self.number
        for rank in self.state.ranks:
            self.feed(wire.Ack(rank.who, number, Position(n, 0)))
        for rank in self.state.ranks:
            self.feed(wire.Arrived(rank.who, number, Position(n, 0)))

    @property
    def number(self) -> int:
        """The running round's."""
        assert self.state.round is not None
        return self.state.round.number

    def write(self, rank: int = 0, n: int = 7) -> list[Entry]:
        """This rank saves."""
        number = self.number
        self.feed(wire.Saving(who(rank), number))
        return self.feed(wire.Saved(who(rank), number, n, (FILE,), 40))

    def names(self) -> list[str]:
        """Every event told of so far."""
        return [entry.event for entry in self.all]


def only(entries: list[Entry], event: str) -> Entry:
    """The one line of this event."""
    (found,) = [entry for entry in entries if entry.event == event]
    return found


def fields(entries: list[Entry], event: str) -> dict[str, Any]:
    """Its fields."""
    return only(entries, event).fields


def test_a_saved_and_left_run_tells_the_whole_chain_of_words() -> None:
    """REQUESTED, AGREED, ARRIVED, SAVING, WRITTEN, VERIFIED, COMMITTED of the rank, and what was decided, in order."""
    story = Story(LOCAL, ranks=1)
    story.signal()
    number = story.number
    story.agree()
    story.write()
    story.feed(ev.Verified(number, "full", "", 1_000))
    story.feed(ev.Committed(number, 7, ev.CommitResult.COMMITTED, ""))
    story.feed(wire.Left(who(0), number, again=False))
    story.feed(ev.CommandExited(0))
    assert [name for name in story.names() if name != "phase"] == [
        "rank_hello", "signal", "notice", "round_begun", "rank_requested", "rank_agreed", "agreed", "rank_arrived", "go",
        "rank_saving", "rank_written", "verified", "rank_verified", "commit", "rank_committed", "round_committed", "leaving",
        "rank_left", "command_exited", "exit",
    ]  # fmt: skip
    assert fields(story.all, "agreed") == {"round": 1, "step": 7, "safe_point": 0}
    assert fields(story.all, "rank_written") == {"round": 1, "rank": 0, "after_ms": 40, "save_ms": 40, "files": 1, "bytes": 1_000}
    assert fields(story.all, "commit") == {
            "round": 1, "step": 7, "result": "committed", "reason": "", "save_ms": 20, "hold_ms": 20, "verify_ms": 20,
        }  # fmt: skip
    assert fields(story.all, "leaving") == {"outcome": "fresh", "step": 7, "reason": ""}
    assert fields(story.all, "exit")["code"] == 75
    assert {entry.level for entry in story.all} <= {"info", "debug"}


def test_a_notice_is_told_with_the_time_that_each_part_gets() -> None:
    """Why, and how long until the save, the check, the way out and the kill."""
    story = Story(LOCAL, ranks=1)
    lines = story.signal("SIGUSR1")
    assert fields(lines, "signal") == {"signal": "SIGUSR1", "meaning": "save and leave"}
    notice = fields(lines, "notice")
    assert (notice["by"], notice["cause"], notice["left_ms"]) == ("SIGUSR1", "signal", 30_000)
    shares = [notice[key] for key in ("save_left_ms", "verify_left_ms", "leave_left_ms", "out_left_ms")]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 30_000
    assert fields(lines, "round_begun") == {
        "round": 1, "kind": "save and leave", "ranks": [0], "save_left_ms": shares[0], "tries": 1,
    }  # fmt: skip
    assert [entry for entry in story.signal("SIGTERM") if entry.event == "notice"] == []


def test_a_rank_that_fails_is_named_with_its_reason_in_a_periodic_round_too() -> None:
    """Training goes on after it, so nothing else would tell why there is no checkpoint."""
    story = Story(LOCAL, ranks=2)
    story.feed(ev.SignalCame("SIGUSR2", ev.Meaning.SAVE))
    number = story.number
    story.agree()
    story.write(0)
    lines = story.feed(wire.Failed(who(1), number, "disk full"))
    failed = only(lines, "rank_failed")
    assert (failed.level, failed.fields["rank"], failed.fields["reason"]) == ("warning", 1, "disk full")
    given_up = only(lines, "round_given_up")
    assert given_up.level == "warning"
    assert given_up.fields["ranks"] == {"0": "written", "1": "failed"}
    assert given_up.fields["reason"] == "rank 1 (pid 101) failed: disk full"
    assert only(lines, "partial_dropped").fields["path"] == "/ckpt/.partial-step-000000007-4-1"
    assert "leaving" not in story.names()


def test_a_rank_that_dies_in_mid_save_is_told_once_as_gone() -> None:
    """With its round; the same process's end outside of a round says what is known of it, and after a notice nothing more."""
    story = Story(LOCAL, ranks=1)
    story.signal()
    story.agree()
    lines = story.feed(ev.RankGone(who(0), "its process has ended"))
    gone = only(lines, "rank_gone")
    assert (gone.level, gone.fields["round"], gone.fields["reason"]) == ("warning", 1, "its process has ended")
    assert fields(lines, "leaving")["outcome"] == "stale"
    assert only(lines, "leaving").level == "warning"
    quiet = Story(LOCAL, ranks=1)
    gone = only(quiet.feed(ev.RankGone(who(0), "its process has ended")), "rank_gone")
    how = "its process has ended, without a last word: killed, or by os._exit"
    assert (gone.level, gone.fields) == ("warning", {"rank": 0, "rank_pid": 100, "how": how})
    assert quiet.feed(ev.RankGone(who(0), "its process has ended")) == []


def test_a_rank_that_is_late_is_told_with_what_it_was_waited_for() -> None:
    """The round's end by its deadline names who was not ready, and the number of ms it had."""
    story = Story(LOCAL, ranks=2)
    story.signal()
    story.agree()
    story.write(0)
    lines = story.feed(ev.Tick(), after_ms=29_000)
    late = only(lines, "rank_late")
    assert (late.level, late.fields["rank"]) == ("warning", 1)
    reason = fields(lines, "round_given_up")["reason"]
    assert reason.startswith("the time for the save is over: 29")
    assert reason.endswith("rank 1 (pid 101) arrived")
    assert fields(lines, "leaving")["reason"] == reason


def test_a_save_that_hangs_and_is_tried_again_shows_both_rounds() -> None:
    """The end of the first round and the begin of the second come in one step; neither is lost."""
    story = Story(LOCAL, ranks=1)
    story.signal()
    story.agree()
    lines = story.feed(wire.Failed(who(0), story.number, "raised"))
    assert [entry.event for entry in lines if entry.event != "phase"] == [
        "rank_failed", "round_given_up", "round_begun", "rank_requested", "partial_dropped",
    ]  # fmt: skip
    begun = fields(lines, "round_begun")
    assert (begun["round"], begun["tries"]) == (2, 2)


def test_verification_and_commit_are_told_with_what_went_wrong() -> None:
    """A bad file is a warning, a commit that failed an error; the checkpoint is not called committed."""
    story = Story(LOCAL, ranks=1)
    story.signal()
    story.agree()
    story.write()
    lines = story.feed(ev.Verified(story.number, "full", "truncated: state.pt: 5 of 9 bytes", 5))
    verified = only(lines, "verified")
    assert verified.level == "warning"
    assert verified.fields == {"round": 1, "mode": "full", "problem": "truncated: state.pt: 5 of 9 bytes", "bytes": 5}
    assert "verification: truncated" in fields(lines, "round_given_up")["reason"]
    other = Story(LOCAL, ranks=1)
    other.signal()
    other.agree()
    other.write()
    other.feed(ev.Verified(other.number, "full", "", 5))
    lines = other.feed(ev.Committed(other.number, 7, ev.CommitResult.FAILED, "ENOSPC: No space left on device"))
    assert only(lines, "commit").level == "error"
    assert fields(lines, "leaving")["reason"] == "failed: ENOSPC: No space left on device"
    assert "round_committed" not in [entry.event for entry in lines]


def test_a_step_that_is_committed_already_ends_its_round_as_committed() -> None:
    """Nothing is written, and nothing is called given up (rule 10)."""
    story = Story(Policy(directory="/ckpt", resume_from="/ckpt/step-000000007", resume_step=7), ranks=1)
    story.signal()
    story.agree(7)
    assert "round_given_up" not in story.names()
    assert fields(story.all, "round_committed")["step"] == 7
    assert fields(story.all, "leaving")["outcome"] == "fresh"
    assert "go" not in story.names()


def test_looks_requeue_and_waiting_are_told_with_their_result() -> None:
    """A look shows what it saw; a failed one is a warning and says whether it is worth trying again."""
    story = Story(IN_SLURM)
    look = fields(story.feed(ev.Looked(VIEW, "start")), "look")
    assert look == {
        "why": "start", "state": "RUNNING", "reason": "None", "restarts": 0, "end_s": 900, "preempt_s": None, "requeue": True,
        "batch": True,
    }  # fmt: skip
    failed = only(story.feed(ev.Looked(NoView("timed out", definite=False), "end time")), "look_failed")
    assert (failed.level, failed.fields) == ("warning", {"why": "end time", "reason": "timed out", "definite": False})
    waits = only(story.feed(ev.Met(ready=False, reason="step 1 of this job is still at work")), "requeue_waits")
    assert waits.fields["reason"] == "step 1 of this job is still at work"
    assert only(story.feed(ev.RequeueReturned(ev.RequeueResult.ACCEPTED, "")), "requeue").level == "info"
    refused = only(story.feed(ev.RequeueReturned(ev.RequeueResult.REFUSED, "disabled")), "requeue")
    assert (refused.level, refused.fields) == ("warning", {"result": "refused", "reason": "disabled"})


def test_a_notice_that_turns_out_to_be_a_rehearsal_is_told_as_over() -> None:
    """`scancel --signal=USR1` with no end in sight: the round goes on as one after which training goes on (field case 26)."""
    story = Story(IN_SLURM, ranks=1)
    story.feed(ev.Looked(VIEW, "start"))
    story.signal("SIGUSR1", ev.Meaning.NOTICE)
    lines: list[Entry] = []
    for _ in range(3):  # One look may be too early: it is believed after two more.
        lines = story.feed(ev.Looked(VIEW, "signal SIGUSR1"), 400)
        story.feed(ev.Tick(), 400)
    assert only(lines, "notice_over").fields["reason"].startswith("no end is near")
    assert fields(lines, "round_turned")["kind"] == "save and go on"


def test_ranks_are_told_once_when_they_attach_finish_and_leave() -> None:
    """Repeated words leave no second line; a refused process is named as refused, not as attached."""
    story = Story(LOCAL)
    hello = wire.Hello(who(0), wire.VERSION, 1, 0, sharded=False)
    assert fields(story.feed(hello), "rank_hello") == {
        "rank": 0,
        "rank_pid": 100,
        "world_size": 1,
        "generation": 0,
        "sharded": False,
    }
    assert story.feed(hello) == []
    lines = story.feed(wire.Hello(Who(0, 0, 999), wire.VERSION, 1, 0, sharded=False))
    assert [entry.event for entry in lines] == ["rank_refused"]
    assert lines[0].fields["rank_pid"] == 999
    assert "taken by the live process 100" in lines[0].fields["reason"]
    assert fields(story.feed(wire.Finished(who(0), 0)), "rank_finished") == {"rank": 0}
    assert story.feed(wire.Finished(who(0), 0)) == []


def test_the_end_of_the_command_is_a_warning_only_if_it_was_not_asked_for() -> None:
    """A code that is not 0 while nobody has been told to leave."""
    assert only(Story(LOCAL).feed(ev.CommandExited(0)), "command_exited").level == "info"
    story = Story(LOCAL)
    lines = story.feed(ev.CommandExited(139))
    assert (only(lines, "command_exited").level, fields(lines, "command_exited")) == ("warning", {"code": 139})
    assert fields(lines, "exit") == {"code": 139, "line": "training failed by itself with status 139"}


def test_asking_and_ending_the_command_are_told_with_why() -> None:
    """Nobody attached: the command is asked to end at once on a notice, then killed, and the lines say for what reason."""
    story = Story(LOCAL)
    lines = story.signal()
    assert fields(lines, "command_asked") == {"why": "no rank had attached yet"}
    assert fields(story.feed(ev.Tick(), 2_000), "command_ended") == {"why": "no rank had attached yet"}
    assert fields(lines, "leaving") == {"outcome": "stale", "step": -1, "reason": "no rank had attached yet"}


def test_why_a_notice_is_over_is_said_rightly() -> None:
    """A rehearsal is no end; a save that the owner asked for, to leave after it, and that fails is another matter."""
    story = Story(IN_SLURM, 1)
    story.feed(ev.Asked("leave_after_save"))
    story.signal("SIGUSR2", ev.Meaning.SAVE)
    assert story.state.notice is not None
    number = story.number
    lines = story.feed(wire.Failed(who(0), number, "OSError: no space"))
    over = next(entry for entry in lines if entry.event == "notice_over")
    assert over.fields["reason"] == "the save that was asked for did not make it: training goes on"
