"""The throwaway Slurm of deploy/lab as tests see it: submit, watch, disturb, look back.

Owns: running Slurm's commands against one lab (inside its chroot, if it has one), reading their
answers into dicts, and waiting for a job's state with a bound.
Must not: know anything about the product, or start daemons itself. Everything about daemons goes
through the command line of deploy/lab/lab.py, the same that people use.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.lab_text import Job, JobId, RequeueCall, parse_jobcomp, parse_jobs, parse_requeue_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

LAB_PROGRAM = Path(__file__).resolve().parents[2] / "deploy" / "lab" / "lab.py"
CHROOT_VARIABLE = "SLURM_LAB_CHROOT"
LAB_S = 150
POLL_S = 0.05
REVOKED_S = 3  # released within 2 s of its requeue a job fails with "Job credential revoked" (docs/slurm.md section 2)


def lab_program(*words: str) -> dict[str, Any]:
    """Runs deploy/lab/lab.py and gives its JSON line."""
    argv = [sys.executable, str(LAB_PROGRAM), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LAB_S, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)}: {done.returncode}\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _option_words(options: Mapping[str, object]) -> list[str]:
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if name in ("job_requeue", "backfill"):
            words += [] if value else [flag.replace("--", "--no-", 1)]
        elif value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


class Lab:
    """One running lab. Make it with `with Lab.up(root, ...) as lab:`."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        """Takes what `lab.py up` or `status` printed."""
        self.info = dict(info)
        self.root = Path(info["root"])
        self.nodes: list[str] = list(info["nodes"])
        self.slurm_version: str = info["slurm_version"]
        self.proctrack: str = info["proctrack"]
        self.kill_wait: int = info["kill_wait"]
        self.grace: int = info["grace"]
        self.chroot: str | None = info["chroot"]

    @classmethod
    @contextlib.contextmanager
    def up(cls, root: Path, **options: object) -> Iterator[Lab]:
        """Options are those of `lab.py up`: nodes=4, proctrack="linuxproc", kill_wait=6, user_signal=True, ...

        `root` must be short (60 characters) and, for jobs of ordinary users, readable by all. SLURM_LAB_CHROOT in the
        environment chooses the other Slurm version for every lab of a test run (`lab.py make-chroot`).
        """
        options = {"chroot": os.environ.get(CHROOT_VARIABLE)} | options
        info = lab_program("up", "--root", str(root), *_option_words(options))
        try:
            yield cls(info)
        finally:
            lab_program("down", "--root", str(root))

    @property
    def log(self) -> Path:
        """slurmctld's log."""
        return Path(self.info["slurmctld_log"])

    # Running Slurm's commands

    def env(self, **more: str) -> dict[str, str]:
        """The environment for a command that is to talk to this lab: nothing of a surrounding Slurm job in it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SQUEUE", "CKPT_"))}
        return kept | {"SLURM_CONF": self.info["conf"]} | more

    def argv(self, *argv: str, cwd: Path | None = None) -> list[str]:
        """The command line that runs `argv` where the lab's own clients are: through chroot if it has one."""
        if self.chroot is None:
            return list(argv)
        # chroot(1) changes to /; env -C goes to where the caller meant to be. Whole paths: the caller's PATH may hold nothing.
        return ["/usr/sbin/chroot", self.chroot, "/usr/bin/env", "-C", str(cwd or self.root), *argv]

    def run(
        self,
        *argv: str,
        timeout: float = 60,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; the caller looks at the return code."""
        return subprocess.run(
            self.argv(*argv, cwd=cwd),
            env=dict(env) if env is not None else self.env(),
            input=stdin if stdin is not None else "",
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def checked(self, *argv: str, **how: Any) -> str:
        """Runs a command that must succeed and gives its output."""
        done = self.run(*argv, **how)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    # Jobs

    def sbatch(
        self,
        script: str,
        *options: str,
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Submits a script text and gives the job id. The output is appended to, so that every run can be seen."""
        if not script.startswith("#!"):
            script = "#!/bin/bash\n" + script
        words = ["sbatch", "--parsable", "--open-mode=append", "-o", str(output or self.root / "%j.out"), *options]
        return int(self.checked(*words, stdin=script, env=env, cwd=cwd).split(";")[0])

    def jobs(self, jobid: JobId) -> list[Job]:
        """All records that `scontrol show job` has of it (several for arrays and hetjobs); times are epoch seconds."""
        done = self.run("scontrol", "show", "job", str(jobid), env=self.env(SLURM_TIME_FORMAT="%s"))
        return parse_jobs(done.stdout) if done.returncode == 0 else []

    def job(self, jobid: JobId) -> Job:
        """The record of exactly this job."""
        record = self.seen(jobid)
        if record is None:
            raise AssertionError(f"slurmctld knows no job {jobid}")
        return record

    def seen(self, jobid: JobId) -> Job | None:
        """The same for whoever asks again: None where slurmctld knows no such job, or was too busy to answer."""
        records = self.jobs(jobid)
        own = [record for record in records if record["JobId"] == str(jobid)] or records
        return own[0] if own else None

    def wait_job(self, jobid: JobId, true: Callable[[Job], bool], timeout: float, what: str) -> Job:
        """Waits until the job's record fulfils a condition."""
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while True:
            record = self.seen(jobid)
            if record is not None and true(record):
                return record
            if time.monotonic() >= deadline:
                raise AssertionError(f"job {jobid}: no {what} within {timeout} s, but {record}")
            pause.wait(POLL_S)

    def wait_state(self, jobid: JobId, states: Collection[str], timeout: float, restarts: int | None = None) -> Job:
        """Waits for one of these JobStates (and, if given, exactly that many restarts)."""
        wanted = {states} if isinstance(states, str) else set(states)

        def there(record: Job) -> bool:
            return record["JobState"] in wanted and restarts in (None, int(record["Restarts"]))

        return self.wait_job(jobid, there, timeout, f"{'/'.join(sorted(wanted))} with restarts={restarts}")

    def node_of(self, jobid: JobId) -> str:
        """The job's first node."""
        return self.nodes_of(jobid)[0]

    def nodes_of(self, jobid: JobId) -> list[str]:
        """All of the job's nodes."""
        words = self.job(jobid)["NodeList"]
        return self.checked("scontrol", "show", "hostnames", words).split()

    def preempt(self, target: JobId | Sequence[str], script: str = "exec sleep 1\n") -> int:
        """Submits a job to `high` that needs all of these nodes (or of this job's nodes), and gives its id."""
        nodes = self.nodes_of(target) if isinstance(target, int) else self._as_nodes(target)
        where = ["-p", "high", "--exclusive", "-N", str(len(nodes)), "-w", ",".join(nodes)]
        return self.sbatch(script, "-J", "preemptor", *where, output=Path("/dev/null"))

    def _as_nodes(self, target: str | Sequence[str]) -> list[str]:
        if not isinstance(target, str):
            return list(target)
        return [target] if target in self.nodes else self.nodes_of(target)

    def wait_preempted(self, jobid: JobId, timeout: float = 60) -> Job:
        """Waits until Slurm has chosen the job for preemption (its grace has begun)."""
        return self.wait_job(jobid, lambda record: record.get("PreemptTime") not in (None, "None"), timeout, "preemption")

    def release_requeued(self, jobid: JobId, timeout: float = 90) -> None:
        """Lets a requeued job start now instead of after the 2 minutes that Slurm waits."""
        record = self.wait_state(jobid, {"PENDING"}, timeout)
        # SubmitTime is the moment of the requeue, when the old run was entirely over.
        early_s = int(record["SubmitTime"]) + REVOKED_S - time.time()
        if early_s > 0:
            threading.Event().wait(early_s)
        self.checked("scontrol", "update", f"JobId={jobid}", "StartTime=now")

    def cancel(self, jobid: JobId, *options: str) -> None:
        """`scancel`, with its own options."""
        self.checked("scancel", *options, str(jobid))

    def cancel_all(self, timeout: float = 90) -> None:
        """Ends every job of the lab and waits until all nodes are free: for labs that several tests use."""
        for jobid in self.checked("squeue", "-h", "-r", "-o", "%A").split():
            self.run("scancel", jobid)
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while self.checked("squeue", "-h", "-o", "%A %T"):
            if time.monotonic() >= deadline:
                raise AssertionError(f"jobs do not end: {self.checked('squeue', '-h')}")
            pause.wait(POLL_S)

    # Looking back

    def jobcomp(self, jobid: JobId) -> list[Job]:
        """The records of jobcomp.txt, one for each run that ended (JobState=PENDING: requeued)."""
        return parse_jobcomp(Path(self.info["jobcomp"]).read_text(errors="replace"), jobid)

    def requeue_calls(self, jobid: JobId) -> list[RequeueCall]:
        """Every `scontrol requeue` of the job that reached slurmctld, accepted or not; Slurm's own requeues are none."""
        return parse_requeue_calls(self.log.read_text(errors="replace"), jobid)

    # Disturbances

    def daemon(self, name: str, action: str) -> None:
        """name: munged, slurmctld, slurmd.NODE; action: stop (SIGSTOP), cont, kill (SIGKILL), start."""
        lab_program("daemon", "--root", str(self.root), name, action)

    def controller_stop(self) -> None:
        """Freezes slurmctld (SIGSTOP)."""
        self.daemon("slurmctld", "stop")

    def controller_cont(self) -> None:
        """Lets a frozen slurmctld go on."""
        self.daemon("slurmctld", "cont")

    def controller_kill(self) -> None:
        """SIGKILLs slurmctld; see save_state."""
        self.daemon("slurmctld", "kill")

    def controller_start(self) -> None:
        """Starts slurmctld again and waits until it answers."""
        self.daemon("slurmctld", "start")

    def save_state(self, jobid: JobId) -> None:
        """Waits until slurmctld has written the job's present state to disk.

        It writes up to 5 s late: a job submitted just before a SIGKILL of slurmctld is unknown to the next one.
        """
        file = self.root / "state" / "job_state"
        # A time would not do: the state may be written before anybody has asked what time it is, and then not again.
        mark = f"saved-{time.time_ns()}"
        self.checked("scontrol", "update", f"JobId={jobid}", f"AdminComment={mark}")

        def is_there(_: Job) -> bool:
            with contextlib.suppress(FileNotFoundError):  # slurmctld takes the old one away before it puts the new one there.
                return mark.encode() in file.read_bytes()
            return False

        self.wait_job(jobid, is_there, 60, f"{mark} in {file}")

    def node_kill(self, node: str) -> None:
        """SIGKILLs all of a node and tells slurmctld that it is DOWN."""
        lab_program("node-kill", "--root", str(self.root), node)

    def node_cut(self, nodes: Sequence[str]) -> None:
        """Has Slurm lose these nodes, whose tasks run on where nobody of Slurm sees them."""
        lab_program("node-cut", "--root", str(self.root), ",".join(nodes))

    def node_start(self, node: str) -> None:
        """Brings a killed node back and waits until it can be used."""
        lab_program("node-start", "--root", str(self.root), node)

    def status(self) -> dict[str, Any]:
        """What `lab.py status` prints."""
        return lab_program("status", "--root", str(self.root))
