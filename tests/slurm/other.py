"""The tests of this directory on the other Debian's Slurm: `make test-slurm-other`.

Owns: a chroot made and mounted by deploy/lab, the run of pytest over tests/slurm with every lab in it, and the unmounting.
The tree stays for the next time, since to make it takes minutes: SLURM_LAB_CHROOT says where (default: /var/tmp/slurm-lab-other).
Must not: test anything itself, or leave mounts behind; `lab.py drop-chroot --delete ROOT` removes the tree as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAB = HERE.parents[1] / "deploy" / "lab" / "lab.py"
VARIABLE = "SLURM_LAB_CHROOT"
DEFAULT = "/var/tmp/slurm-lab-other"


def lab(*words: str) -> dict[str, object]:
    """One command of deploy/lab; its JSON line. It says itself what is wrong."""
    done = subprocess.run([sys.executable, str(LAB), *words], stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Run the tests with the words given to pytest; its exit status."""
    root = str(Path(os.environ.get(VARIABLE) or DEFAULT).resolve())
    try:
        made = lab("make-chroot", "--other", root)
    except subprocess.CalledProcessError as error:
        return error.returncode
    try:
        print(f"Slurm {made['slurm_version']} of Debian {made['suite']} in {root}", flush=True)
        words = sys.argv[1:] or ["-n", "2", "--dist", "worksteal"]
        env = {**os.environ, VARIABLE: root}
        return subprocess.run([sys.executable, "-m", "pytest", str(HERE), *words], env=env, check=False).returncode
    finally:
        lab("drop-chroot", root)


if __name__ == "__main__":
    sys.exit(main())
