"""Train with Accelerate, elastically. Three lines differ from a plain script; they are numbered.

python examples/accelerate/train.py                                      # one process
shoal run --gpus 1..4 -- python examples/accelerate/train.py             # elastically
"""

from __future__ import annotations

import os
from pathlib import Path

from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import torch
from shoal.integrations.accelerate import prepare  # 1
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator()
    x = torch.randn(1600, 8)
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)

    job, model, optimizer, loader = prepare(accelerator, model, optimizer, loader)  # 2
    for _ in job.epochs(int(os.environ.get("EPOCHS", "3"))):  # 3
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            job.log(loss=loss)  # `shoal ps` shows it
    if job.is_main:  # Accelerate's `is_main_process` is true on every worker
        output = Path(os.environ.get("OUTPUT_DIR", "trained"))
        output.mkdir(parents=True, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), output / "model.pt")


if __name__ == "__main__":
    main()
