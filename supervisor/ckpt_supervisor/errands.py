"""What the loop has others do: every command of the machine that touches a disk or Slurm, run in a lane, back as an event.

Owns the lanes' work and the translation of its results. Must not decide: whatever comes of an errand, also a fault of ours in it,
is an event for the machine. Time-outs are bounds against a hanging controller (docs/slurm.md, section 3), not expectations.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.adapters.slurm import Scontrol
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.between import CheckedFile
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.history import History
from ckpt_supervisor.core.views import JobView, NoView
from ckpt_supervisor.directory import adoption as adopting
from ckpt_supervisor.directory import disk, upkeep
from ckpt_supervisor.directory.calm import Calm
from ckpt_supervisor.directory.upkeep import Space, Spared, Upkeep
from ckpt_supervisor.doctor.at_start import Short
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.start import earlier, resume_gate
from ckpt_supervisor.start.resume_gate import Resume
from ckpt_supervisor.store import FileEntry
from ckpt_supervisor.tasks.meeting import Meeting, state_directory
from ckpt_supervisor.tasks.meeting import Verdict as MeetVerdict

LOOK_TIMEOUT_S = 12.0
REQUEUE_TIMEOUT_S = 15.0
CONFIG_TIMEOUT_S = 10.0

LANES = ("slurm", "requeue", "store", "prune", "drop", "journal", "meeting", "watch", "hang", "control", "notify", "metrics")

Errand = do.LookUp | do.Verify | do.Commit | do.DropPartial | do.Prune | do.Adopt | do.Meet | do.CallRequeue | do.Resubmit


class Errands:
    """Carries commands out in lanes; `feed` takes the events, `log` the journal entries. Both run in the loop's thread."""

    def __init__(self, launch: Launch, lanes: Lanes, feed: Callable[[ev.Event], None], log: Callable[[Entry], None]) -> None:
        self._launch = launch
        self._lanes = lanes
        self._feed = feed
        self._log = log
        self._entries: dict[int, dict[int, disk.Entries]] = {}
        """The manifest's entries of each round, by the task that has read the files."""
        self._spared = Spared()
        """Replaced whenever something changes: lanes read it."""
        self._plain: set[int] = set()  # Rounds with files of which only the program knows when they are written.
        self._calm = Calm()
        self._upkeep = Upkeep(launch.options, launch.epoch, lambda: self._spared, self._calm.wait, self._calm.over)
        self._room = upkeep.ENOUGH
        adopts = launch.options.adopt and launch.joined is None
        self._adoption = adopting.Adoption(launch.options, launch.job, launch.epoch, say) if adopts else None
        self._has_chosen = launch.started is not None
        job = launch.job
        self.scontrol = Scontrol.locate(job.slurm, launch.env, launch.claims) if job.slurm is not None else None
        self._short = Short(launch, lanes, log, self.scontrol)
        self._meeting = Meeting(state_directory(launch.env), job.name, job.step_id, job.attempt, str(launch.options.dir))

    def begin(self, kill_wait: Callable[[int], None]) -> None:
        """What is done once at the start, beside everything else."""
        epoch, options, name = self._launch.epoch, self._launch.options, self._launch.job.name
        self._short.begin()
        for line in self._launch.taken_over:
            say(line)
            self._log(Entry("taken_over", "info", {"text": line}))
        before = lambda: earlier.last_failure(options.dir, name, epoch)  # noqa: E731
        self._lanes.post("prune", "reading the journal before", before, self._failed_before)
        self._lanes.post("prune", "reading what earlier attempts came to", self._recall, self._recalled)
        if self._launch.started is not None:
            self._sweep()
        if self._launch.job.slurm is not None:
            self._lanes.post("meeting", "announcing this step", lambda: self._meeting.announce("running"), self._announced)
        self.ask_kill_wait(kill_wait)

    def ask_kill_wait(self, kill_wait: Callable[[int], None]) -> None:
        """Ask Slurm how long it waits between SIGTERM and SIGKILL, where the user has not said it."""
        scontrol = self.scontrol
        if scontrol is not None and self._launch.options.kill_wait_ms is None:

            def found(answer: Any) -> None:
                if isinstance(answer, int) and answer > 0:
                    kill_wait(answer)
                    self._log(Entry("kill_wait", "info", {"kill_wait_ms": answer}))

            self._lanes.post("slurm", "asking KillWait", lambda: scontrol.kill_wait(CONFIG_TIMEOUT_S), found)

    def end(self, own_end: bool, step: int) -> None:
        """This step is over. `own_end`: training came to its end by itself, with nobody asking it to."""
        from ckpt_supervisor.start import finished

        launch, post = self._launch, self._lanes.post
        noting = lambda work: post("journal", "noting the end", work, _ignore)  # noqa: E731 - the lane that _flush waits for
        finished.note(noting, launch.options, launch.job, launch.epoch, step if own_end else None)
        if self._launch.job.slurm is not None and self._launch.joined is None:
            self._lanes.post("meeting", "withdrawing", self._meeting.withdraw, _ignore)

    def choose(self, progress: Callable[[int, int], None] | None, then: Callable[[Resume], None], after_ms: int = 0) -> None:
        """Look for what the next start resumes from; what was passed over is told."""
        options, job, epoch = self._launch.options, self._launch.job.name, self._launch.epoch

        def chosen(resume: Any) -> None:
            if isinstance(resume, Broken):
                resume = Resume("", -1, (), f"{options.dir} cannot be looked at: {resume.error}")
            for line in resume.lines:
                say(line)
                self._log(Entry("passed_over", "warning", {"text": line}))
            for note in resume.notes:
                say(note)
                self._log(Entry("resuming", "info", {"text": note}))
            self.warn(list(resume.warnings))
            read = {resume.step} if resume.path and options.verify_mode == "full" else set()
            self._spared = Spared(self._spared.protected | {resume.step}, resume.damaged, frozenset(read), self._spared.plain)
            self._calm.put("choosing", False)
            # Not before: the look may be replacing a manifest, by way of a name that the sweep takes for rubbish.
            self._sweep()
            then(resume)

        self._calm.put("choosing", True)  # The one that it falls back to must not be on its way out.
        self._adopt_first()

        def look(_: Any) -> None:
            def work() -> Resume:
                threading.Event().wait(after_ms / 1_000)  # What made it fail may pass.
                return resume_gate.choose(options, job, epoch, progress)

            self._lanes.post("store", "choosing a checkpoint", work, chosen)

        if self._has_chosen:
            # A restart in place: what the journal is still to be told of the last start counts.
            self._lanes.post("journal", "flush", lambda: None, look)
        else:
            look(None)
        self._has_chosen = True

    def _sweep(self) -> None:
        self._lanes.post("prune", "sweeping", self._upkeep.sweep, self._pruned)

    def saving(self, is_on: bool) -> None:
        """Somebody saves, or the last save is near: what can wait does not touch the disk meanwhile."""
        self._calm.put("saving", is_on)

    def carry_out(self, command: Errand, protected: frozenset[int]) -> None:
        """Run one command. `protected`: steps that are never pruned."""
        if self._spared.protected != protected:
            self._spared = dataclasses.replace(self._spared, protected=protected)
        match command:
            case do.LookUp(why=why, after_ms=after_ms):
                self._look(why, after_ms)
            case do.Verify():
                self._verify(command)
            case do.Commit():
                self._commit(command)
            case do.DropPartial(partial=partial):
                self._drop(partial)
            case do.Prune():
                self._lanes.post("prune", "pruning", self._upkeep.prune, self._pruned)
                self._lanes.post("prune", "looking for room", self._upkeep.make_room, self._seen)
            case do.Adopt(final=final):
                self._adopt(final)
            case do.Meet():
                self._lanes.post("meeting", "meeting the other steps", self._meeting.meet, self._met)
            case do.CallRequeue():
                self._requeue()
            case do.Resubmit(reason=reason):
                self._resubmit(reason)

    def warn(self, lines: list[str]) -> None:
        """Tell the user and the journal."""
        for line in lines:
            say(line)
            self._log(Entry("warning", "warning", {"text": line}))

    def _look(self, why: str, after_ms: int) -> None:
        scontrol = self.scontrol
        if scontrol is None:
            self._feed(ev.Looked(NoView("scontrol was not found", definite=True), why))
            return

        def looked(view: Any) -> None:
            if isinstance(view, Broken):
                view = NoView(f"{view.what}: {view.error}", definite=False)
            if why == "start" and isinstance(view, JobView):
                self._short.looked(view)
            self._feed(ev.Looked(view, why))

        def look() -> JobView | NoView:
            threading.Event().wait(after_ms / 1_000)  # In the lane: heirs of a lost coordinator ask one after the other.
            return scontrol.show_job(LOOK_TIMEOUT_S)

        self._lanes.post("slurm", "looking at the job", look, looked)

    def _requeue(self) -> None:
        scontrol = self.scontrol
        if scontrol is None:
            self._feed(ev.RequeueReturned(ev.RequeueResult.UNKNOWN, "scontrol was not found"))
            return

        def returned(answer: Any) -> None:
            if isinstance(answer, Broken):
                self._feed(ev.RequeueReturned(ev.RequeueResult.UNKNOWN, f"{answer.what}: {answer.error}"))
            else:
                self._feed(ev.RequeueReturned(ev.RequeueResult[answer.kind.upper()], answer.reason))

        # Not in the lane of the looks: while this call hangs with its answer lost, a look tells that it was accepted.
        self._lanes.post("requeue", "requeue", lambda: scontrol.requeue(REQUEUE_TIMEOUT_S), returned)

    def _resubmit(self, reason: str) -> None:
        """The owner's own way of bringing the job back."""
        launch, meeting = self._launch, self._meeting

        def over(answer: Any) -> None:
            accepted, said = (False, f"{answer.what}: {answer.error}") if isinstance(answer, Broken) else answer
            self._feed(ev.Resubmitted(accepted, said))

        def run() -> tuple[bool, str]:
            from ckpt_supervisor.processes import resubmit

            if not meeting.first_to_resubmit():
                return True, "another step of this job has done it"
            answer = resubmit.run(launch, reason)
            if not answer.accepted:
                meeting.not_resubmitted()
            return answer

        self._lanes.post("requeue", "--resubmit", run, over)

    def _verify(self, command: do.Verify) -> None:
        mode = "full" if command.full else "structure"

        def verified(result: Any) -> None:
            if isinstance(result, Broken):
                self._feed(ev.Verified(command.round, mode, f"{result.what}: {result.error}", 0))
                return
            (problem, count, entries), cost = result
            if cost is not None:
                self._log(Entry("readback", "info", {"round": command.round, **cost}))
            if self._launch.joined is None:
                self._entries.setdefault(command.round, {})[0] = entries
                self._plain |= set() if disk.is_spoken_for(command, entries) else {command.round}
                self._feed(ev.Verified(command.round, mode, problem, count))
            else:
                files = tuple(CheckedFile(entry.path, entry.bytes, entry.xxh3_128, entry.rank) for entry in entries)
                self._feed(ev.Verified(command.round, mode, problem, count, files=files))

        check = disk.check if self._launch.joined is None else disk.check_share
        from_disk = command.full and self._launch.options.verify == "readback"
        work = lambda: disk.measured(check, command) if from_disk else (check(command), None)  # noqa: E731
        self._lanes.post("store", "verifying", work, verified)

    def took(self, task: int, number: int, files: tuple[CheckedFile, ...]) -> None:
        """Another task has verified its ranks' files of this round."""
        entries = tuple(FileEntry(file.path, file.size_bytes, file.xxh3_128, file.rank) for file in files)
        self._entries.setdefault(number, {})[task] = entries

    def _commit(self, command: do.Commit) -> None:
        launch = self._launch
        shares = self._entries.pop(command.round, {})
        self._entries = {number: kept for number, kept in self._entries.items() if number > command.round}
        entries = tuple(sorted((entry for share in shares.values() for entry in share), key=lambda entry: entry.path))
        created = datetime.now(timezone.utc).isoformat(timespec="microseconds")

        def commit() -> tuple[ev.CommitResult, str]:
            return disk.commit(launch.options.dir, launch.job, launch.epoch, command, entries, created, launch.place)

        def committed(result: Any) -> None:
            if isinstance(result, Broken):
                result = (ev.CommitResult.FAILED, f"{result.what}: {result.error}")
            if result[0] in (ev.CommitResult.COMMITTED, ev.CommitResult.ALREADY_THERE):
                self._stands(command)
            self._feed(ev.Committed(command.round, command.step, *result))

        self._lanes.post("store", "committing", commit, committed)

    def _adopt(self, final: bool) -> None:
        adoption = self._adoption
        assert adoption is not None
        adoption.damaged = self._spared.damaged

        def looked(found: Any) -> None:
            if isinstance(found, Broken):
                found = adopting.Found(problem=f"{found.what}: {found.error}")
            steps, mode = set(found.steps), self._launch.options.verify_mode
            read = self._spared.read | (steps if mode == "full" else set())
            self._spared = dataclasses.replace(self._spared, damaged=self._spared.damaged - steps, read=read)
            self._feed(ev.Adopted(found.steps, found.problem, final, found.fresh, found.again))

        work = lambda: adoption.look(final=final, hurries=self._calm.over.is_set)  # noqa: E731
        self._lanes.post("store", "looking at what the program wrote", work, looked)

    def mark(self) -> None:
        """The program is about to be signalled: what it has written by now is no answer to that."""
        if self._adoption is not None:
            self._lanes.post("drop", "marking what the program wrote", self._adoption.mark, _ignore)

    def forget_mark(self) -> None:
        """It had the signal already."""
        if self._adoption is not None:
            self._adoption.forget_mark()

    def _adopt_first(self) -> None:
        """What an earlier attempt's program has left; before a checkpoint is chosen."""
        adoption = self._adoption
        if adoption is None:
            return
        adoption.damaged = self._spared.damaged

        def looked(found: Any) -> None:
            if isinstance(found, Broken):
                found = adopting.Found(problem=f"{found.what}: {found.error}")
            self.warn([*found.lines] or ([f"not kept: {found.problem}"] if found.problem else []))
            if found.steps:
                self._log(Entry("adopted", "info", {"steps": list(found.steps), "problem": ""}))

        # Before a restart in place the commands of other tasks still run.
        is_over = not self._has_chosen or self._launch.job.tasks == 1
        work = adoption.first_look if is_over else lambda: adoption.look(final=False)
        self._lanes.post("store", "looking at what the program wrote", work, looked)

    def _met(self, verdict: Any) -> None:
        if isinstance(verdict, Broken):
            verdict = MeetVerdict(True, f"{verdict.what}: {verdict.error}")
        self._feed(ev.Met(verdict.ready, verdict.reason))

    def _failed_before(self, text: Any) -> None:
        if text and not isinstance(text, Broken):
            self.warn([text])

    def _recall(self) -> History:
        from ckpt_supervisor.start import history

        return history.read(self._launch.options.dir, self._launch.job.name, self._launch.epoch)

    def _recalled(self, found: Any) -> None:
        self._short.recalled(() if isinstance(found, Broken) else found.saves_ms)
        if isinstance(found, Broken):
            self._log(Entry("warning", "warning", {"text": f"{found.what}: {found.error}"}))
            found = History()
        self._feed(ev.Recalled(found))

    def _announced(self, problem: Any) -> None:
        if problem:
            self.warn([f"the state directory cannot be used ({problem}): ckptctl will not find this job by its number"])

    def _stands(self, command: do.Commit) -> None:
        """This step is committed. A damaged one of it has been put aside; one that was there has been read."""
        plain = self._spared.plain - {command.step} | ({command.step} if command.round in self._plain else set())
        damaged = self._spared.damaged - {command.step}
        read = self._spared.read | ({command.step} if command.verified == "full" else set())
        self._spared = dataclasses.replace(self._spared, damaged=damaged, read=read, plain=plain)

    def _drop(self, partial: str) -> None:
        """Out of the way first, and not behind what waits for calm: the disk may be full, and the save is tried once more."""

        def drop() -> tuple[str, Space]:
            return disk.drop(self._launch.options.dir, partial), self._upkeep.make_room(in_calm=False)

        def dropped(result: Any) -> None:
            problem, space = (f"{result.what}: {result.error}", result) if isinstance(result, Broken) else result
            self._dropped(problem)
            self._seen(space)

        self._lanes.post("drop", "dropping a partial", drop, dropped)

    def _seen(self, space: Any) -> None:
        """What was found about room is told when it changes."""
        if isinstance(space, Broken):
            space = Space(upkeep.UNKNOWN, f"{space.what}: {space.error}")
        is_new = space.state != self._room and bool(space.text)
        if is_new:
            self._room = space.state
            say(space.text)
        if is_new or space.removed:
            level = "info" if space.state == upkeep.ENOUGH else "warning"
            fields = {"state": space.state, "text": space.text, **space.fields, "removed": list(space.removed)}
            self._log(Entry("room", level, fields))

    def _dropped(self, problem: Any) -> None:
        if problem:
            self._log(Entry("partial_not_dropped", "warning", {"reason": str(problem)}))

    def _pruned(self, result: Any) -> None:
        if isinstance(result, Broken):
            self._log(Entry("prune_failed", "warning", {"reason": str(result.error)}))
        elif result.names or result.problems:
            self._log(Entry("pruned", "info", {"removed": list(result.names), "problems": list(result.problems)}))


def _ignore(_: Any) -> None:
    return None
