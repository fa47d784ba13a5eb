"""Train with Accelerate, elastically. Three lines are Shoal's; model and optimizer are wrapped before `prepare`.

python examples/accelerate/train.py                                      # one process
shoal run --gpus 1..4 -- python examples/accelerate/train.py             # elastically
"""

from __future__ import annotations

import os
from pathlib import Path

from accelerate import Accelerator
from torch.utils.data import TensorDataset

import shoal.torch as shoal
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator()
    x = torch.randn(1600, 8)
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    job = shoal.init()  # 1
    model, optimizer = accelerator.prepare(*job.wrap(model, optimizer))  # 2
    loader = job.loader(dataset, batch_size=32)  # 3  not prepared: the job splits the data

    for _ in job.epochs(int(os.environ.get("EPOCHS", "3"))):
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs.to(accelerator.device))
            loss = nn.functional.mse_loss(outputs, targets.to(accelerator.device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            job.log(loss=loss)
    if job.is_main:
        output = Path(os.environ.get("OUTPUT_DIR", "trained"))
        output.mkdir(parents=True, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), output / "model.pt")


if __name__ == "__main__":
    main()
