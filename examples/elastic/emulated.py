"""A job with emulated step time, so that scaling is visible on a machine with few cores.

Each sample costs a sleep of 4 ms in addition to the real step of a tiny model: a worker with 16 samples needs 64 ms,
one with 8 samples 32 ms. Gradients, synchronisation and resizes are real.
"""

from __future__ import annotations

import argparse
import time

import shoal.torch as shoal
import torch
from torch import nn


class Line(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 640

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([i / 640])
        return x, 3 * x - 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ms-per-sample", type=float, default=4.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    job = shoal.init()
    model = nn.Linear(1, 1)
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.2))
    loader = job.loader(Line(), batch_size=16)
    for epoch in job.epochs(args.epochs):
        began_s = time.perf_counter()
        for x, y in loader:
            if not job.rehearsing:
                time.sleep(len(x) * args.ms_per_sample / 1e3)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            job.log(loss=loss)
        if job.is_main:
            seconds = time.perf_counter() - began_s
            print(f"epoch {epoch}: {job.world_size} workers, {640 / seconds:.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
