"""What `ckptctl COMMAND --help` shows below the options: examples, and what the exit status means where it is not plain.

Owns these texts for the commands that have none of their own. Each example can be typed as it stands: a test reads every one with
the parser that it is shown by.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

EXAMPLES: dict[str, str] = {
    "ls": """\
examples:
  ckptctl ls                                  the checkpoints of ./checkpoints (or $CKPT_SUPERVISE_DIR)
  ckptctl ls --dir $SCRATCH/run7 --all        also what was put aside, partials and trash
  ckptctl ls --json | jq -r 'select(.verdict != "intact") | .path'
""",
    "latest": """\
exit status: 0 found, 1 there is none, 3 could not look

examples:
  ckptctl latest                              every byte of it is read
  ckptctl latest --quick                      names and sizes only, at once
  python evaluate.py "$(ckptctl latest --dir $SCRATCH/run7)"
""",
    "show": """\
examples:
  ckptctl show 1200
  ckptctl show $SCRATCH/run7/latest           what `latest` leads to
  ckptctl show 1200 --files 1000              name all of its files
  ckptctl show 1200 --json | jq '.files[].bytes'
""",
    "verify": """\
exit status: 0 all intact, 1 one is not, 3 one could not be read

examples:
  ckptctl verify                              the newest one, every byte
  ckptctl verify 1200 1400 --dir $SCRATCH/run7
  ckptctl verify --all --threads 8            all of them, with a progress bar
  ckptctl verify --deep model.safetensors     a file or directory that somebody else wrote
""",
    "keep": """\
It is read in full before it is protected. What is protected does not count toward --keep.

examples:
  ckptctl keep 1200
  ckptctl keep $SCRATCH/run7/latest           the newest one
  ckptctl keep 1200 --release                 it goes when its turn comes
""",
    "prune": """\
Nothing goes before the newest intact one was read in full, and nothing while a job is at work in DIR.

examples:
  ckptctl prune --dry-run                     what would go, and why the others stay
  ckptctl prune --keep 2
  ckptctl prune --keep 1 --keep-every 10000 --dir $SCRATCH/run7
""",
    "repair": """\
Nothing that was ever committed is deleted, and nothing is done while a job is at work in DIR.

examples:
  ckptctl repair --dry-run                    what is out of order
  ckptctl repair
  ckptctl repair --restore 1200               one that was set aside, as training failed from it
""",
    "save": """\
exit status: 0 taken (with --wait: committed), 1 refused or not over in time, 2 wrong usage, 3 could not look

examples:
  ckptctl save 4711                           have it save, and train on
  ckptctl save 4711 --wait 10m --protect      wait for the commit; that checkpoint is never pruned
  ckptctl save 4711 --leave --requeue         give the nodes back now and wait in the queue
  ckptctl save 4711 --every 5m                save this often from now on
""",
    "status": """\
exit status: 0 told, 1 no such job, 2 wrong usage, 3 could not look

examples:
  ckptctl status                              the newest job of ./checkpoints
  ckptctl status 4711
  ckptctl status 100_3 --json | jq -r .state  an element of an array
""",
    "doctor": """\
exit status: 0 nothing to mend, 1 something is, 2 wrong usage, 3 something could not be looked at

examples:
  ckptctl doctor --script job.sh              before it is submitted
  ckptctl doctor --job 4711                   a job in the queue, or one that runs
  ckptctl doctor --dir $SCRATCH/run7          what is installed, this directory, this site
""",
}


def add(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Put them below the options of the commands."""
    for name, text in EXAMPLES.items():
        if name not in commands:
            continue  # One command alone was asked for.
        commands[name].epilog = text
        commands[name].formatter_class = argparse.RawDescriptionHelpFormatter
