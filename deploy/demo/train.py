"""A small character-level language model, trained on the sources of Python's own library. The supervised part is one line.

Deterministic on CPU: the same seed gives the same weights, interrupted or not, which is what the demo shows.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import time
from pathlib import Path

import ckpt_client as ckpt
import torch
from torch import nn

FILES = ("argparse.py", "ast.py", "datetime.py", "heapq.py", "inspect.py", "pathlib.py", "random.py", "textwrap.py", "typing.py")
LETTERS = 128
CONTEXT = 64
BATCH = 24
WIDTH = 96


class Model(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self) -> None:
        """Random weights."""
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.read = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.score = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: (batch, context) of letter numbers; result: (batch, context, letters)."""
        seen, _ = self.read(self.embed(text))
        return self.score(seen)


def corpus() -> torch.Tensor:
    """The text as a row of bytes (a 1-D tensor of whole numbers below LETTERS)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / name).read_bytes() for name in FILES if (library / name).is_file())
    return torch.tensor([byte for byte in text if byte < LETTERS])


def main() -> None:
    """Train for --steps steps; print a line now and then; write the weights' digest and a line for every step if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--digest", type=Path, help="write the SHA-256 of the final weights here")
    parser.add_argument("--ledger", type=Path, help="append the number and the time of every step that was run")
    options = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    text = corpus()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

    for step in ckpt.steps(options.steps, model=model, optimizer=optimizer, schedule=schedule):  # this line is all
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        scores = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if options.ledger is not None:
            with options.ledger.open("a") as ledger:
                ledger.write(f"{step} {time.time():.3f}\n")
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
    print(f"trained to the end: weights sha256 {digest}", flush=True)
    if options.digest is not None:
        options.digest.write_text(digest + "\n")


if __name__ == "__main__":
    main()
