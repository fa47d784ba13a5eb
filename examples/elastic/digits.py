"""An image classifier on the handwritten digits that ship with scikit-learn: 1,797 images of 8 x 8."""

from __future__ import annotations

import argparse

from sklearn.datasets import load_digits

import shoal.torch as shoal
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    train = torch.utils.data.TensorDataset(x[:1500], y[:1500])

    torch.manual_seed(0)
    job = shoal.init()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = job.wrap(model, optimizer)
    loader = job.loader(train, batch_size=64)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    job.state["scheduler"] = scheduler

    for epoch in job.epochs(args.epochs):
        model.train()
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            scheduler.step()
            job.log(loss=loss)
        if job.is_main:
            model.eval()
            with torch.no_grad():
                accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
            job.log(accuracy=accuracy)
            print(f"epoch {epoch}: {job.world_size} workers, accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
