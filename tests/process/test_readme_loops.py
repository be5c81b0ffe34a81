"""The loop with epochs and a DataLoader, as the README and help() show it, run with real torch: interrupted, it loses nothing."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import ckpt_client

from tests.support.run import eventually, supervised

ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import itertools, pathlib, sys, time
import torch
import ckpt_client as ckpt
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
torch.set_num_threads(1)
epochs = 4
dataset = TensorDataset(torch.randn(500, 3), torch.randn(500, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
log = open(sys.argv[1], "a", buffering=1)
"""

PER_STEP = """
    log.write(f"{step} {float(x.sum())!r}\\n")
    time.sleep(float(sys.argv[2]))
"""

AFTER = """
torch.save(model.state_dict(), sys.argv[3])
"""


def readme_loop() -> str:
    """The block of the README that has a DataLoader in it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [text for text in blocks if "DataLoader(" in text]
    return str(block)


def program(tmp_path: Path) -> Path:
    """The README's block as a program: what it takes for granted before it, and a log of each step's batch."""
    path = tmp_path / "train.py"
    path.write_text(SETUP + readme_loop().rstrip("\n") + PER_STEP + AFTER)
    return path


def steps_of(log: Path) -> list[str]:
    """The lines of the log."""
    return log.read_text().splitlines() if log.exists() else []


def test_epochs_and_a_dataloader_lose_no_batch_when_the_run_is_interrupted_in_mid_epoch(tmp_path: Path) -> None:
    """Every batch once, in the order of an undisturbed run without a supervisor, and the same weights in the end."""
    import torch

    path = program(tmp_path)
    plain, ours = tmp_path / "plain.log", tmp_path / "ours.log"
    subprocess.run([sys.executable, str(path), str(plain), "0", str(tmp_path / "plain.pt")], check=True)
    expected = steps_of(plain)
    assert [int(line.split()[0]) for line in expected] == list(range(4 * 8))
    command = [sys.executable, str(path), str(ours), "0.3", str(tmp_path / "ours.pt")]
    with supervised(tmp_path, command) as run:
        eventually(lambda: len(steps_of(ours)) >= 11, "eleven steps: the second epoch has begun", 120)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        seen = len(steps_of(ours))
        assert run.intact() == [seen]
    command[-2] = "0"
    with supervised(tmp_path, command) as run:
        assert run.code() == 0, run.story()
    assert steps_of(ours) == expected
    weights, again = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "ours.pt")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_help_shows_the_loops_and_the_functions() -> None:
    """help(ckpt_client) in an interpreter that has used none of them yet."""
    words = "import pydoc, ckpt_client; print(pydoc.plain(pydoc.render_doc(ckpt_client)))"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout
    for part in (
        "ckpt.steps(total_steps, model=model",
        "zip(loop, batches(loop.start))",
        "hook = ckpt.attach(save=save",
        "FUNCTIONS",
    ):
        assert part in said
    assert re.search(r"^    steps\(stop", said, re.MULTILINE)
    assert re.search(r"^    attach\(save", said, re.MULTILINE)


def test_the_docstring_shows_the_same_loop_as_the_readme() -> None:
    """One is a copy of the other, and is not left behind."""
    (function,) = [node for node in ast.walk(ast.parse(readme_loop())) if isinstance(node, ast.FunctionDef)]
    text = ckpt_client.__doc__ or ""
    shown = textwrap.dedent(text[text.index("    def batches") : text.index("    loop = ckpt.steps")])
    assert ast.dump(ast.parse(shown).body[0]) == ast.dump(function)
