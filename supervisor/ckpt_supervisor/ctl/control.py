"""`ckptctl save`: asks a running job to save, to leave after that, or to save at another interval. Its owner only.

Owns the command line of `save` and `status`, what is looked at before a request is made, and what is said while it is waited for.
Must not ask where nobody would answer: each refusal is one line that says what is known. The request goes through DIR/control
(watches/control_files.py); what was not taken in time is taken back, so that it is not obeyed when nobody expects it any more.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpt_supervisor import store
from ckpt_supervisor.config_text import duration_ms, positive_ms
from ckpt_supervisor.ctl.words import (
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    Interrupt,
    complain,
    could_not_look,
    interruptible,
    out,
    out_json,
)
from ckpt_supervisor.text import one_line

TAKEN_S = 20.0
"""A supervisor looks every 5 s; one on NFS, on a loaded node, gets some more."""

WAIT_S_MAX = 7 * 86_400.0
LOOK_S = 0.25

LIFE_S = 10.0
"""While a save is waited for, whether the job still lives is looked at this often."""

_BARE = re.compile(r"[0-9]+(_[0-9]+)?(\.([0-9]+|batch))?")

SAVE_HELP = "have a running job save now; its owner only"
SAVE_MORE = """\
The job looks into DIR/control every 5 seconds. Nothing is asked of a job that is over, waits in the queue, or is somebody else's.
With --wait the exit status is 0 once the checkpoint is committed; without it, once the job has taken the request.
"""


def add_control(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The commands `save` and `status`."""
    from ckpt_supervisor.ctl import status as status_command

    job = "4711, 100_3 for an element of an array, 4711.0 for one step (default: the newest job of DIR)"
    save = kinds.add_parser("save", parents=[common], help=SAVE_HELP, description=SAVE_MORE)
    save.add_argument("job", nargs="?", metavar="JOB", help=job)
    save.add_argument("--wait", nargs="?", const="", metavar="TIME", help="until it is committed, at most so long")
    save.add_argument("--leave", action="store_true", help="leave after this save: the job ends with 75 and is not requeued")
    save.add_argument("--requeue", action="store_true", help="with --leave: and have it put back into the queue")
    save.add_argument("--protect", action="store_true", help="protect the checkpoint from being pruned, as ckptctl keep does")
    save.add_argument("--every", metavar="TIME|auto", help="save this often from now on, in this attempt; does not save now")
    save.set_defaults(run=ask)
    status = kinds.add_parser(
        "status", parents=[common], help="how a job stands: what it does, its attempts, its newest checkpoint"
    )
    status.add_argument("job", nargs="?", metavar="JOB", help=job)
    status.set_defaults(run=status_command.status)


class _Wish:
    """What the command line asks for, read. Raises ValueError."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        wait: str | None = arguments.wait
        if wait and arguments.job is None and _BARE.fullmatch(wait):
            arguments.job, wait = wait, ""  # `save --wait 4711`: a number alone is the job, a time has a unit.
        self.wait_s = None if wait is None else WAIT_S_MAX if not wait else min(WAIT_S_MAX, duration_ms(wait) / 1000)
        self.what = "every" if arguments.every is not None else "leave" if arguments.leave else "save"
        self.protect: bool = arguments.protect
        self.requeue: bool = arguments.requeue
        self.every_ms = None if arguments.every in (None, "auto") else positive_ms(arguments.every)
        if arguments.every is not None and (arguments.leave or arguments.protect or arguments.requeue):
            raise ValueError("--every changes the interval and saves nothing now: give it alone")
        if arguments.requeue and not arguments.leave:
            raise ValueError("--requeue goes with --leave: a job that goes on needs none")


def ask(arguments: argparse.Namespace) -> int:
    """Ask all steps of the job, one after the other."""
    from ckpt_supervisor.ctl import status as status_command

    try:
        wish = _Wish(arguments)
    except ValueError as error:
        complain(f"save: {error}")
        return EXIT_USAGE
    homes = status_command.homes(arguments, "save")
    if isinstance(homes, int):
        return homes
    worst = EXIT_OK
    with interruptible() as stop:
        for home in homes:
            code = _ask_one(arguments, home, wish, stop)
            if code == EXIT_INTERRUPTED:
                return code
            worst = max(worst, code)
    return worst


def _ask_one(arguments: argparse.Namespace, home: Any, wish: _Wish, stop: Interrupt) -> int:
    from ckpt_supervisor.ctl import status as status_command

    owner = _owner(home.dir)
    if owner is not None and owner != os.geteuid():
        return _refused(
            arguments, home, f"{home.dir} is in use by {_user(owner)}, and only the owner of a job may ask it to save"
        )
    job = status_command.gathered(arguments, home)
    if isinstance(job, int):
        return job
    last, word = job.starts[-1], job.standing.word
    if job.holder is None or job.holder.epoch != last.epoch:
        held = "" if job.holder is None else f"; {store.describe_holder(job.holder)} has the directory now"
        return _refused(arguments, job.home, f"{job.name} is over{_ended_at(last)}: {job.standing.text}{held}")
    if not job.standing.listens:
        return _refused(arguments, job.home, f"{job.name} {_not_at_work(word, _ended_at(last))}: {job.standing.text}")
    if word == "leaving":
        return _refused(arguments, job.home, f"{job.name} is on its way out already ({job.standing.text})")
    return _Call(arguments, job, wish, stop).run()


def _not_at_work(word: str, since: str) -> str:
    words = {"waiting": f"waits in the queue{since}, and nothing trains", "ending": "is just ending"}
    return words.get(word, f"has not run{since} ({word})" if since else f"does not run ({word})")


def _ended_at(last: Any) -> str:
    return "" if last.last is None else f" since {last.last:%Y-%m-%d %H:%M:%S} UTC"


def _owner(directory: Path) -> int | None:
    """The user whose supervisor works here: what it has made itself tells; None if nothing does."""
    for path in (directory / store.CONTROL, directory / store.ATTEMPT, directory):
        try:
            return path.lstat().st_uid
        except OSError:
            continue
    return None


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _refused(arguments: argparse.Namespace, home: Any, why: str, code: int = EXIT_NOT_FOUND) -> int:
    complain(f"not asked: {why}")
    if arguments.json:
        out_json({"job": home.job, "step_id": home.step_id, "dir": str(home.dir), "result": "refused", **_nothing(why)})
    return code


def _nothing(why: str) -> dict[str, Any]:
    return {"step": None, "path": None, "reason": why}


class _Call:
    """One request, from its file to its last word."""

    def __init__(self, arguments: argparse.Namespace, job: Any, wish: _Wish, stop: Interrupt) -> None:
        from ckpt_supervisor.watches import control_files

        self._files = control_files
        self._arguments = arguments
        self._job = job
        self._wish = wish
        self._stop = stop
        self._root: Path = job.home.dir
        self._nonce = control_files.new_nonce()
        self._began = time.monotonic()
        self._told = ""
        self._before: int = job.starts[-1].committed

    def run(self) -> int:
        """Ask, wait as long as was said, and tell; the exit status."""
        files, last = self._files, self._job.starts[-1]
        request = files.Request(
            nonce=self._nonce, job=last.job, step_id=last.step_id, attempt=last.number, epoch=last.epoch, what=self._wish.what,
            who=_user(os.geteuid()).removeprefix("user "), host=os.uname().nodename, at=datetime.now(timezone.utc).isoformat(),
            protect=self._wish.protect, requeue=self._wish.requeue, every_ms=self._wish.every_ms,
            waits=self._wish.wait_s is not None,
        )  # fmt: skip
        try:
            files.make_place(self._root, os.geteuid())
            files.post(self._root, request)
        except files.NotOurs as error:
            return self._tell("refused", reason=str(error))
        except PermissionError as error:
            return self._tell("refused", reason=f"{error.filename} cannot be written: {error.strerror}")
        except OSError as error:
            return could_not_look(self._root, error)
        try:
            answer = self._until(TAKEN_S)
            if answer is None:
                return self._not_taken()
            if answer.result == "taken" and self._wish.wait_s is not None:
                self._progress(answer.reason)
                left_s = self._wish.wait_s - (time.monotonic() - self._began)
                answer = self._until(left_s, last_word=True) or answer
        except OSError as error:
            return could_not_look(self._root, error)
        if self._stop.is_set():
            complain(f"{self._job.name} has taken it; what it was asked for goes on")
            return EXIT_INTERRUPTED
        if answer.result == "taken" and self._wish.wait_s is not None:
            return self._not_over(answer)
        files.forget(self._root, self._nonce)
        return self._tell(answer.result, answer.step, answer.path, answer.reason)

    def _until(self, bound_s: float, last_word: bool = False) -> Any:
        """The first answer, or the last one; None if it is not in time, at ctrl-C, or if nobody is there any more."""
        end = time.monotonic() + bound_s
        look_at = time.monotonic() + LIFE_S
        while True:
            found = self._files.read_answer(self._root, self._nonce)
            if found is not None and (not last_word or found.result != "taken"):
                return found
            now = time.monotonic()
            if now >= end or self._stop.is_set():
                return None
            if last_word:
                self._follow()
            if now >= look_at:
                look_at = now + LIFE_S
                if not self._lives():
                    end = min(end, now + LOOK_S)  # Its last word may be there by now.
            self._stop.wait(min(LOOK_S, max(0.0, end - now)))

    def _lives(self) -> bool:
        from ckpt_supervisor.ctl import status as status_command

        job = status_command.gathered(self._arguments, self._job.home)
        if isinstance(job, int):
            return True  # Could not look: it is asked again.
        same = job.starts[-1].epoch == self._job.starts[-1].epoch
        self._job = job
        return same and job.starts[-1].code is None and job.standing.listens

    def _not_taken(self) -> int:
        try:
            taken_back = self._files.withdraw(self._root, self._nonce)
        except OSError as error:
            return could_not_look(self._root, error)
        if self._stop.is_set():
            complain("taken back: nothing was asked" if taken_back else f"{self._job.name} has just taken it: it goes on")
            return EXIT_INTERRUPTED
        if not taken_back:
            return self._tell("refused", reason="it was taken, and no answer came", code=EXIT_UNKNOWN)
        waited = time.monotonic() - self._began
        standing = self._job.standing
        known = f"{standing.word}: {standing.text}" if standing.text else standing.word
        why = (
            f"{self._job.name} did not answer within {waited:.0f} s, and the request was taken back; what is known of it: {known}"
        )
        return self._tell("refused", reason=why, code=EXIT_UNKNOWN if standing.word == "unknown" else EXIT_NOT_FOUND)

    def _not_over(self, answer: Any) -> int:
        last = self._job.starts[-1]
        if last.committed > self._before and self._wish.what != "every":  # It has ended before it could say so.
            return self._tell("saved", last.committed, str(self._root.absolute() / store.step_name(last.committed)))
        if last.code is not None or not self._job.standing.listens:
            why = f"{self._job.name} has ended meanwhile: {self._job.standing.text}"
            if last.committed >= 0:
                why += f"; its newest commit is step {last.committed}"
            return self._tell("refused", reason=why)
        return self._tell("refused", reason=f"not over within the time given; it goes on ({answer.reason})")

    def _follow(self) -> None:
        """A line whenever the save has come further."""
        from ckpt_supervisor.ctl.job_standing import standing
        from ckpt_supervisor.view.attempts import attempts

        last = self._job.starts[-1]
        now = next((one for one in reversed(attempts(self._root, last.job, last.step_id)) if one.epoch == last.epoch), None)
        if now is not None and now.round is not None:
            self._progress(standing(now, self._job.outside).text)

    def _progress(self, text: str) -> None:
        if text and text != self._told and not self._arguments.json:
            self._told = text
            sys.stderr.write(f"ckptctl: {self._job.name}: {one_line(text)}\n")

    def _tell(self, result: str, step: int = -1, path: str = "", reason: str = "", code: int | None = None) -> int:
        home = self._job.home
        if self._arguments.json:
            known = {"step": step if step >= 0 else None, "path": path or None, "reason": reason or None}
            out_json({"job": home.job, "step_id": home.step_id, "dir": str(home.dir), "result": result, **known})
        elif result != "refused":
            out(one_line(_in_words(self._job.name, self._wish, (result, step, path, reason))))
        if result == "refused":
            complain(f"{self._job.name}: {reason}" if not reason.startswith(self._job.name) else reason)
        return (EXIT_NOT_FOUND if result == "refused" else EXIT_OK) if code is None else code


def _in_words(name: str, wish: _Wish, told: tuple[str, int, str, str]) -> str:
    result, step, path, reason = told
    if result == "saved":
        more = "" if not wish.protect else f" ({reason})"
        return f"step {step} is saved: {path}{more}"
    if result == "done":
        every = "as --every auto says" if wish.every_ms is None else f"every {wish.every_ms / 1000:g} s"
        return f"{name} saves {every} from now on, in this attempt"
    leaves = {"leave": ", and leaves after that", "save": ""}[wish.what]
    back = " (it comes back into the queue)" if wish.requeue else ""
    return f"{name} saves{leaves}{back}: {reason}; ckptctl status shows how it goes"
