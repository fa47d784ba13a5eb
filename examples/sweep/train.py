"""One run of the sweep: a small regression. `python train.py -m` starts all eight; see README.md."""

import hydra
from omegaconf import DictConfig

import torch
from torch import nn


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> float:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, config.width), nn.Tanh(), nn.Linear(config.width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    for _ in range(config.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"lr={config.lr} width={config.width} loss={loss.item():.4f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    main()
