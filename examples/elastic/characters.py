"""A small transformer that learns to continue text, character by character. The script generates the text: sums.

It shows gradient accumulation, clipping, a learning-rate schedule and an average of the weights as job state, and
checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import random

import shoal.torch as shoal
import torch
from torch import nn

CONTEXT = 24


def sums(count: int) -> str:
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        a, b = rng.randrange(50), rng.randrange(50)
        lines.append(f"{a}+{b}={a + b};")
    return "".join(lines)


class Windows(torch.utils.data.Dataset):
    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        self.codes = torch.tensor([self.letters.index(c) for c in text])

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = i * CONTEXT
        return self.codes[begin : begin + CONTEXT], self.codes[begin + 1 : begin + CONTEXT + 1]


class Characters(nn.Module):
    def __init__(self, letters: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)
        self.head.weight = self.embed.weight  # shared
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        h = self.embed(codes) + self.place.weight
        return self.head(self.body(h, mask=self.mask, is_causal=True))


class Average:
    """An exponential average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, new in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(new, 0.02)

    def state_dict(self) -> dict:
        return self.model.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    data = Windows(sums(4000))

    torch.manual_seed(0)
    job = shoal.init()
    model = Characters(len(data.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = job.wrap(model, optimizer)
    accumulate = 2
    loader = job.loader(data, batch_size=32, accumulate=accumulate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=20)
    average = Average(model)
    job.state.update(schedule=schedule, average=average)

    for epoch in job.epochs(args.epochs):
        for codes, following in loader:
            loss = nn.functional.cross_entropy(model(codes).flatten(0, 1), following.flatten()) / accumulate
            loss.backward()
            if job.stepping:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                average.update(model)
                job.log(loss=loss * accumulate)
        job.checkpoint()
        if job.is_main:
            print(f"epoch {epoch}: {job.world_size} workers, loss {loss.item() * accumulate:.3f}", flush=True)


if __name__ == "__main__":
    main()
