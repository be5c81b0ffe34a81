"""`make demo`: a real training run that is preempted twice and resumed twice, and ends with the weights of an undisturbed one.

On a throwaway Slurm where it can be installed (root and apt), else in local mode; says which. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TRAIN = HERE / "train.py"
BIN = Path(sys.executable).parent
STEPS = 240
INTERRUPT_AT = (70, 150)
"""The run is interrupted when it has printed these steps."""

WAIT_S = 180.0


def main() -> int:
    """Run the demo; 0 when the weights are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", action="store_true", help="without Slurm")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ckpt-demo-", dir="/tmp"))  # noqa: S108 - Slurm's sockets need a short path.
    try:
        return demo(work, options.local or not slurm_can_run())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def demo(work: Path, local: bool) -> int:
    """Reference run, interrupted run, comparison."""
    tell("1. The same training, undisturbed")
    subprocess.run([sys.executable, str(TRAIN), "--steps", str(STEPS), "--out", str(work / "reference")], check=True)
    if local:
        tell("2. Supervised, in local mode (no Slurm here, or not root): SIGTERM twice, started again twice")
        run_local(work)
    else:
        tell("2. Supervised, on a throwaway Slurm: preempted twice by jobs of a higher partition, requeued twice")
        run_on_slurm(work)
    tell("3. What happened (ckptctl log)")
    events = [word for name in SHOWN for word in ("--event", name)]
    subprocess.run([str(BIN / "ckptctl"), "log", "--dir", str(work / "checkpoints"), *events], check=True)
    tell("4. The checkpoints (ckptctl ls)")
    subprocess.run([str(BIN / "ckptctl"), "ls", "--dir", str(work / "checkpoints")], check=True)
    tell("5. The result")
    return compare(work)


SHOWN = ("command_started", "notice", "agreed", "rank_written", "verified", "commit", "requeue", "exit")


def run_local(work: Path) -> None:
    """Interrupt with SIGTERM, start again, until training has ended by itself."""
    output = work / "output"
    for attempt in range(len(INTERRUPT_AT) + 1):
        with output.open("ab") as file:
            run = subprocess.Popen(command(work), stdout=file, stderr=file, cwd=work)
        if attempt < len(INTERRUPT_AT):
            wait_for(lambda a=attempt: reached(output, INTERRUPT_AT[a]), f"step {INTERRUPT_AT[attempt]}")
            run.send_signal(signal.SIGTERM)
        code = run.wait(timeout=WAIT_S)
        print(f"   attempt {attempt}: exit status {code}", flush=True)
    show(output)


def run_on_slurm(work: Path) -> None:
    """Bring a lab up, submit, preempt twice, wait for the end, take the lab down."""
    root = work / "lab"
    lab("up", "--root", str(root), "--nodes", "1", "--grace", "60", "--kill-wait", "10", "--cred-expire", "5")
    try:
        env = {**os.environ, "SLURM_CONF": lab_conf(root), "CKPT_SUPERVISE_STATE": str(work / "state")}
        output = work / "output"
        script = "#!/bin/bash\nsrun " + " ".join(command(work)) + "\n"
        job = slurm(env, "sbatch", "--parsable", "-p", "low", "--open-mode=append", f"--output={output}", "-t", "30", stdin=script, cwd=work)
        for count, step in enumerate(INTERRUPT_AT):
            wait_for(lambda s=step: reached(output, s), f"step {step}")
            print(f"   step {step} is reached: a job of partition high takes the node", flush=True)
            slurm(env, "sbatch", "--parsable", "-p", "high", "--exclusive", "--output=/dev/null", stdin="#!/bin/bash\nsleep 1\n", cwd=work)
            wait_for(lambda c=count: restarts(env, job) > c, "the requeue")
            print(f"   job {job} is requeued (Restarts={restarts(env, job)}); it comes back by itself", flush=True)
        wait_for(lambda: (work / "result").exists() and state(env, job) not in ("RUNNING", "COMPLETING"), "the end of training")
        print(f"   job {job} ended: {state(env, job)}", flush=True)
        show(output)
    finally:
        lab("down", "--root", str(root))


def command(work: Path) -> list[str]:
    """The supervised training command."""
    return [
        *(str(BIN / "ckpt-supervise"), "--dir", str(work / "checkpoints"), "--every-steps", "50", "--keep", "3", "--"),
        *(sys.executable, str(TRAIN), "--steps", str(STEPS), "--out", str(work / "result")),
    ]


def compare(work: Path) -> int:
    """Equal weights, and which steps were run twice or never."""
    expected, found = (work / "reference").read_text().strip(), (work / "result").read_text().strip()
    steps = [int(number) for number in re.findall(r"^step +(\d+) ", (work / "output").read_text(), re.MULTILINE)]
    wanted = list(range(0, STEPS, 10))
    print(f"   undisturbed: {expected}\n   interrupted: {found}")
    print(f"   steps lost or run twice: {len(steps) - len(set(steps)) + len(set(wanted) - set(steps))} of those printed")
    same = expected == found and steps == wanted
    print("   The weights are bit for bit the same." if same else "   THE RUNS DIFFER.")
    return 0 if same else 1


def slurm_can_run() -> bool:
    """Whether Slurm is here or can be installed."""
    return os.geteuid() == 0 and lab("install", check=False) == 0


def lab(*words: str, check: bool = True) -> int:
    """Call the lab's own command line."""
    done = subprocess.run([sys.executable, str(REPOSITORY / "deploy" / "lab" / "lab.py"), *words], stdout=subprocess.DEVNULL, check=check)
    return done.returncode


def lab_conf(root: Path) -> str:
    """Where the lab's slurm.conf is."""
    line = subprocess.run(
        [sys.executable, str(REPOSITORY / "deploy" / "lab" / "lab.py"), "env", "--root", str(root)],
        check=True, capture_output=True, text=True,
    ).stdout
    return line.split("SLURM_CONF=", 1)[1].split()[0].strip("'\";")


def slurm(env: Mapping[str, str], *words: str, stdin: str = "", cwd: Path | None = None) -> str:
    """Run a Slurm client; its output."""
    return subprocess.run(words, input=stdin, env=dict(env), cwd=cwd, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def field(env: Mapping[str, str], job: str, name: str) -> str:
    """One field of `scontrol show job`."""
    found = re.search(rf"\b{name}=(\S+)", slurm(env, "scontrol", "show", "job", job))
    return found[1] if found else ""


def restarts(env: Mapping[str, str], job: str) -> int:
    """How often the job was requeued."""
    return int(field(env, job, "Restarts") or 0)


def state(env: Mapping[str, str], job: str) -> str:
    """The job's state."""
    return field(env, job, "JobState")


def reached(output: Path, step: int) -> bool:
    """Whether this step was printed."""
    return output.exists() and re.search(rf"^step +{step} ", output.read_text(), re.MULTILINE) is not None


def wait_for(fact: Callable[[], bool], what: str) -> None:
    """Wait for a fact, within a bound."""
    end = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not fact():
        if time.monotonic() > end:
            raise SystemExit(f"waited {WAIT_S:.0f} s for {what}")
        pause.wait(0.1)


def show(output: Path) -> None:
    """What the run printed, indented."""
    for line in output.read_text().splitlines():
        print(f"   | {line}", flush=True)


def tell(line: str) -> None:
    """A heading."""
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
