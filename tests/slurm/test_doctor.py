"""`ckptctl doctor` and its short form at the start, on wrong set-ups of a real Slurm, and on the job scripts in deploy/templates.

Owns: what docs/doctor.md says, as far as Slurm takes part, and field cases 2, 13, 48, 50, 53, 112 and 149 as far as a finding
goes. What needs no Slurm (file systems without fsync or rename, clocks, versions, hanging disks) is in
tests/process/test_doctor.py and tests/unit/test_doctor_*.py.
Must not: repeat what becomes of such a job; other tests here show that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from ckpt_supervisor.watches import unattached

from tests.support.slurm_stage import BIN, CTL, SUPERVISE, TRAPPED, Run, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.support.lab import Lab
    from tests.support.slurm_stage import Stage

TEMPLATES = sorted((Path(__file__).resolve().parents[2] / "deploy" / "templates").glob("*.sbatch"))
RUN = "srun ckpt-supervise -- python train.py"
GOOD = "#SBATCH --time=10 --requeue --open-mode=append\n"
IN_30_S = {"event": "commit", "result": "committed", "step": 3, "save_ms": 30_000, "hold_ms": 30_000, "mono_ms": 1}


class Wrong(NamedTuple):
    """A script that has something wrong with it, and what has to be said of it."""

    finding: str
    severity: str
    says: str
    advice: str
    script: str
    slow: bool = False
    """The last save took 30 s."""


PLAIN = (
    Wrong("srun", "error", "not started by srun", "srun ckpt-supervise", f"{GOOD}ckpt-supervise -- python train.py\n"),
    Wrong("two-sruns", "error", "line 4 and line 5", "--dir of its own", f"{GOOD}#SBATCH -n2\n{RUN} &\n{RUN} &\nwait\n"),
    Wrong("srun-wait", "warning", "--wait=5", "leave it away", f"{GOOD}#SBATCH -n2\n{RUN.replace('srun', 'srun -W 5')}\n"),
    Wrong("srun-kill-on-bad-exit", "warning", "line 4", "leave it", f"{GOOD}#SBATCH -n2\n{RUN.replace('srun', 'srun -K')}\n"),
    Wrong("time-limit", "warning", "no time limit", "--time=", f"#SBATCH --requeue --open-mode=append\n{RUN}\n"),
    Wrong("signal-no-trap", "error", "no trap for USR1", "take the B: out", f"{GOOD}#SBATCH --signal=B:USR1@90\n{RUN}\n"),
    Wrong(
        "signal-batch", "warning", "the step does not hear it", "B: out",
        f"{GOOD}#SBATCH --signal=B:USR1@90\ntrap : USR1\n{RUN}\n",
    ),
    Wrong("signal-unknown", "error", "does not know SIGALRM", "--signal=USR1@60", f"{GOOD}#SBATCH --signal=ALRM@60\n{RUN}\n"),
    Wrong(
        "signal-short", "warning", "the last save took 30 s", "--signal=USR1@105",
        f"{GOOD}#SBATCH --signal=USR1@10\n{RUN.replace(' --', ' --lead off --')}\n", slow=True,
    ),
    Wrong("signal-missing", "warning", "no --signal", "--signal=USR1@120", f"{GOOD}{RUN.replace(' --', ' --lead off --')}\n"),
    Wrong("grace", "warning", "GraceTime 15 s and KillWait 6 s leave 13.9 s", "--every auto", f"{GOOD}{RUN}\n", slow=True),
    Wrong("preempt-cancel", "warning", "partition lowc cancels", "--every 30m", f"{GOOD}#SBATCH -p lowc\n{RUN}\n"),
    Wrong("open-mode", "warning", "emptied", "--open-mode=append", f"#SBATCH --time=10 --requeue\n{RUN}\n"),
    Wrong(
        "srun-output", "warning", "--output=out.txt", "append as well",
        f"#SBATCH --time=10 --requeue --open-mode=truncate\n{RUN.replace('srun', 'srun -o out.txt')}\n",
    ),
    Wrong("requeue", "error", "--no-requeue", "submit it with --requeue", f"#SBATCH --time=10 --no-requeue\n{RUN}\n"),
    Wrong("export", "warning", "--export=NONE", "SLURM_EXPORT_ENV=ALL", f"{GOOD}#SBATCH --export=NONE\n{RUN}\n"),
    Wrong("two-owners", "warning", "line 3", "take it out", f"{GOOD}trap 'scontrol requeue $SLURM_JOB_ID' TERM\n{RUN}\n"),
    Wrong("requeue-exit", "error", "has none", "--requeue auto", f"{GOOD}{RUN.replace(' --', ' --requeue exit:85 --')}\n"),
    Wrong("nested-srun", "warning", "further srun", "around the training", f"{GOOD}srun ckpt-supervise -- srun python t.py\n"),
    Wrong("options", "error", "unknown option '--evry'", "--help", f"{GOOD}{RUN.replace(' --', ' --evry 3 --')}\n"),
)  # fmt: skip

ODD = (
    Wrong("proctrack", "warning", "proctrack/pgid", "ask the site for cgroup", f"{GOOD}{RUN}\n"),
    Wrong("user-signal-batch", "error", "no notice at all", "B: out", f"{GOOD}#SBATCH --signal=B:USR1@90\ntrap : USR1\n{RUN}\n"),
    Wrong("requeue", "error", "JobRequeue=0", "submit it with --requeue", f"#SBATCH --time=10 --open-mode=append\n{RUN}\n"),
    Wrong("srun-wait", "warning", "WaitTime=30", "srun --wait=0", f"{GOOD}#SBATCH -n2\n{RUN}\n"),
    Wrong("srun-kill-on-bad-exit", "warning", "KillOnBadExit=1", "srun --kill-on-bad-exit=0", f"{GOOD}#SBATCH -n2\n{RUN}\n"),
    Wrong("preempt-cancel", "error", "GraceTime 0", "another partition", f"{GOOD}#SBATCH -p lowx\n{RUN}\n"),
)


def doctor(lab: Lab, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the findings by their ids, the gravest one of each."""
    done = lab.run(CTL, "doctor", "--json", *words, env=lab.env(**(env or {})), timeout=150)
    assert done.returncode in (0, 1, 3), done.stderr
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        finding = json.loads(line)
        found.setdefault(finding["id"], finding)
    return done.returncode, found


def check(found: Mapping[str, Mapping[str, Any]], case: Wrong) -> None:
    """It is found, and the advice is the right one."""
    finding = found[case.finding]
    assert finding["severity"] == case.severity, finding
    assert case.says in finding["text"]
    assert case.advice.lower() in finding["advice"].lower()


def wrong(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ids of what somebody should mend."""
    return [name for name, finding in found.items() if finding["severity"] in ("error", "warning", "unknown")]


def directories(lab: Lab) -> tuple[Path, Path]:
    """One where nothing was saved yet, and one whose last save took 30 s."""
    fresh, slow = lab.root / "fresh", lab.root / "slow"
    fresh.mkdir()
    (slow / "journal").mkdir(parents=True)
    (slow / "journal" / "77-0-0-0-0.jsonl").write_text(json.dumps(IN_30_S) + "\n")
    return fresh, slow


def script_of(lab: Lab, text: str) -> Path:
    """A job script with these lines."""
    path = lab.root / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}")
    return path


def check_scripts(lab: Lab, cases: tuple[Wrong, ...]) -> None:
    """Each wrong script is found out before it is submitted."""
    fresh, slow = directories(lab)
    for case in cases:
        status, found = doctor(lab, "--dir", str(slow if case.slow else fresh), "--script", str(script_of(lab, case.script)))
        assert status == 1
        check(found, case)
    assert sorted(path.name for path in (*fresh.iterdir(), *slow.iterdir())) == ["journal"]


@pytest.mark.timeout(400)
def test_scripts_that_lose_work_are_found_before_they_are_submitted(new_stage: Callable[..., Stage]) -> None:
    """Twenty wrong scripts, each with what to do; and all templates are well, on the same site."""
    lab = new_stage(nodes=2).lab
    check_scripts(lab, PLAIN)
    for template in TEMPLATES:
        status, found = doctor(lab, "--script", str(template), env={"SCRATCH": str(lab.root)})
        assert (status, wrong(found)) == (0, []), template.name
        assert found["srun"]["severity"] == "ok"


def test_sites_that_lose_work_are_found(new_stage: Callable[..., Stage]) -> None:
    """pgid, the user's signal, JobRequeue=0, WaitTime, KillOnBadExit, PreemptMode=CANCEL without grace."""
    lines = "WaitTime=30;KillOnBadExit=1;PartitionName=lowx Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0"
    check_scripts(new_stage(proctrack="pgid", user_signal=True, job_requeue=False, extra=lines).lab, ODD)


def test_places_that_lose_work_are_found(new_stage: Callable[..., Stage], tmp_path: Path) -> None:
    """A directory in memory, full, read-only, without inodes, held; TMPDIR too long and open; no scontrol. Case 112."""
    stage = new_stage()
    lab = stage.lab
    small = lab.root / "small"
    small.mkdir()
    (lab.root / "link").symlink_to(small)
    script = script_of(lab, f"{GOOD}{RUN}\n")
    mount = lab.argv("mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=20", "tmpfs", str(small))
    subprocess.run(mount, check=True)
    try:
        _, found = doctor(lab, "--dir", str(lab.root / "link"), "--script", str(script))
        assert "memory" in found["dir-not-shared"]["text"]
        assert "inodes" in found["dir-no-files"]["text"]
        assert "is full" in found["dir-full"]["text"]
        subprocess.run(lab.argv("mount", "-o", "remount,ro", str(small)), check=True)
        _, found = doctor(lab, "--dir", str(small / "below" / "it"), "--script", str(script))
        assert "read-only" in found["dir-not-writable"]["advice"]
    finally:
        subprocess.run(lab.argv("umount", str(small)), check=True)
    deep, wide = lab.root / ("x" * 100), lab.root / "wide"
    deep.mkdir()
    wide.mkdir()
    wide.chmod(0o777)
    _, found = doctor(lab, "--dir", str(lab.root), "--script", str(script), env={"TMPDIR": str(deep)})
    assert "107 are the most" in found["tmpdir"]["text"]
    _, found = doctor(lab, "--dir", str(lab.root), "--script", str(script), env={"TMPDIR": str(wide)})
    assert "chmod +t" in found["tmpdir-open"]["advice"]
    _, found = doctor(lab, "--dir", str(lab.root), "--job", "1", env={"PATH": str(tmp_path)})
    assert "--requeue exit:N" in found["scontrol"]["advice"]


JOBS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "srun": ((), {"srun": ""}),
    "srun-wait": (("-n2",), {"srun": "srun -W 5"}),
    "srun-kill-on-bad-exit": (("-n2",), {"srun": "srun -K"}),
    "open-mode": (("--open-mode=truncate",), {}),
    "signal-no-trap": ((), {"script": "#SBATCH --signal=B:USR1@60\n{run}\n"}),
    "requeue": (("--no-requeue",), {}),
    "export": (("--export=NONE",), {}),
    "two-owners": ((), {"env": {"SUBMITIT_EXECUTOR": "slurm"}}),
    "grace": ((), {"slow": True}),
}


@pytest.mark.timeout(300)
def test_a_start_says_what_is_wrong_in_one_line_and_nothing_where_all_is_well(new_stage: Callable[..., Stage]) -> None:
    """The short form: each finding once on stderr and in the journal; silent on a good set-up; doctor --job agrees."""
    stage = new_stage(nodes=len(JOBS) + 2)
    command = ["sleep", "600"]
    good = stage.submit("-p", "low", "-t", "5", script="#SBATCH --signal=USR1@60\n" + TRAPPED, command=command)
    for name, (options, how) in JOBS.items():
        journal = stage.lab.root / f"r{len(stage.runs) + 1}" / "journal"
        if how.pop("slow", False):
            journal.mkdir(parents=True)
            (journal / "77-0-0-0-0.jsonl").write_text(json.dumps(IN_30_S) + "\n")
        run = stage.submit("-p", "low", "-t", "5", *options, command=command, **how)
        assert run.jobid, name
    template = template_run(stage)
    for name, run in zip(JOBS, stage.runs[1:-1], strict=True):
        warned = run.wait_event("warning", id=name, timeout=90)
        assert said(run, warned["text"]) == 1, name
    for fine in (good, template):
        assert fine.wait_event("set_up", timeout=90)["wrong"] == []
        # Minutes later it is told that a `sleep` does not attach.
        assert [entry for entry in fine.events("warning") if entry.get("id") != unattached.ID] == []
    status, found = doctor(stage.lab, "--job", str(good.jobid), "--dir", str(good.dir))
    assert (status, wrong(found)) == (0, []), found
    open_mode = stage.runs[1 + list(JOBS).index("signal-no-trap")]
    _, found = doctor(stage.lab, "--job", str(open_mode.jobid), "--dir", str(open_mode.dir))
    assert found["signal-no-trap"]["severity"] == "error"
    _, found = doctor(stage.lab, "--dir", str(good.dir), "--script", str(script_of(stage.lab, f"{GOOD}{RUN}\n")))
    assert "which is alive" in found["dir-held"]["text"]


def template_run(stage: Stage) -> Run:
    """deploy/templates/one-gpu.sbatch as it is, but for the GPU, which a lab has not; on the last node."""
    lab, node = stage.lab, stage.lab.nodes[-1]
    text = re.sub(r"(?m)^#SBATCH --(gpus|cpus-per-task)=.*\n", "", (TEMPLATES[0].parent / "one-gpu.sbatch").read_text())
    (lab.root / "train.py").write_text("import time\ntime.sleep(600)\n")
    env = lab.env(SCRATCH=str(lab.root), CKPT_SUPERVISE_STATE=str(lab.root / "states"), PATH=f"{BIN}:{os.environ['PATH']}")
    out = lab.root / "template.out"
    jobid = lab.sbatch(text, "-p", "low", "-w", node, output=out, env=env, cwd=lab.root)
    stage.runs.append(Run(lab, jobid, node, out, lab.root / "checkpoints" / str(jobid), lab.root / "none.log", [node]))
    return stage.runs[-1]


def said(run: Run, text: str) -> int:
    """How often the job's output has this line."""
    wait_for(lambda: text in run.output(), lambda: f"{text!r} in {run.output()}")
    return run.output().count(text)


def test_doctor_inside_a_job_looks_at_that_job(new_stage: Callable[..., Stage]) -> None:
    """As the script's first line: exit status 1 stops a job whose notices would not arrive, before it trains for hours."""
    stage = new_stage()
    lab = stage.lab
    path = f"{BIN}:{os.environ['PATH']}"
    script = f"#SBATCH -t 5\n{CTL} doctor --dir {lab.root}/ck || exit 7\n{SUPERVISE} --dir {lab.root}/ck -- true\n"
    jobid = lab.sbatch(script, "-p", "low", output=lab.root / "in.out", env=lab.env(PATH=path))
    record = lab.wait_state(jobid, {"FAILED", "COMPLETED"}, 90)
    output = (lab.root / "in.out").read_text()
    assert record["ExitCode"] == "7:0", output
    assert "FAIL  srun " in output
    assert "line 4 of the job script is not started by srun" in output
    assert not (lab.root / "ck").exists()
