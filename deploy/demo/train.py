"""A small character-level language model, trained on the sources of Python's own library. The supervised part is one line.

Deterministic on CPU: the same seed gives the same weights, interrupted or not, which is what the demo shows.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from pathlib import Path

import ckpt_client as ckpt
import torch
from torch import nn

FILES = ("argparse.py", "ast.py", "datetime.py", "heapq.py", "inspect.py", "pathlib.py", "random.py", "textwrap.py", "typing.py")
CONTEXT = 64
BATCH = 24
WIDTH = 96


class Model(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, WIDTH)
        self.read = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.score = nn.Linear(WIDTH, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: (batch, context) of letter numbers; result: (batch, context, letters)."""
        seen, _ = self.read(self.embed(text))
        return self.score(seen)


def corpus() -> torch.Tensor:
    """The text as a row of bytes (a 1-D tensor of whole numbers below 128)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / name).read_bytes() for name in FILES if (library / name).is_file())
    return torch.tensor([byte for byte in text if byte < 128])


def main() -> None:
    """Train for --steps steps; print a line every ten; with --out write the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    text = corpus()
    model = Model(128)
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
        if step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
    print(f"trained to the end: weights sha256 {digest}", flush=True)
    if options.out is not None:
        options.out.write_text(digest + "\n")


if __name__ == "__main__":
    main()
