"""Trains with the features that FEATURES names, in the way of HOW, for the test of the table in docs/elastic.md."""

from __future__ import annotations

import os

from torch.utils.checkpoint import checkpoint

import shoal.torch as shoal
import torch
from torch import nn

HOW, FEATURES = os.environ["HOW"], set(filter(None, os.environ["FEATURES"].split(";")))
ACCUMULATES = "gradient accumulation" in FEATURES or "accumulation with several optimizers" in FEATURES
SEVERAL = "several models and optimizers" in FEATURES or "accumulation with several optimizers" in FEATURES
SAMPLES = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        if "batch norm" in FEATURES:
            self.inner.append(nn.BatchNorm1d(5))

    def forward(self, h):
        if "activation checkpointing" in FEATURES:
            return h + checkpoint(self.inner, h, use_reentrant=False)
        return h + self.inner(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse="sparse gradients" in FEATURES)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 11, bias=False)
        if "frozen and tied parameters" in FEATURES:
            self.head.weight = self.embedding.weight
            self.blocks[1].requires_grad_(False)

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows())


def rows() -> torch.Tensor:
    return torch.randint(0, 11, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))


def make_optimizer(model):
    if "step(closure)" in FEATURES:
        return torch.optim.LBFGS(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=0.05)


def elastic(job, model):
    """The model and its optimizer, made elastic in the way that HOW says."""
    if HOW == "replicated":
        if SEVERAL:
            other = Model()
            optimizers = [make_optimizer(model), make_optimizer(other)]
            job.wrap(models=[model, other], optimizers=optimizers)
            return optimizers[0], []
        optimizer = make_optimizer(model)
        schedulers = schedule(optimizer)
        job.wrap(model, optimizer, schedulers=schedulers)
        return optimizer, schedulers
    group = 2 if HOW == "groups" else None
    optimizer = make_optimizer(model)
    schedulers = schedule(optimizer)
    job.shard(model, optimizer, schedulers=schedulers, layers=Block, group=group)
    if SEVERAL:
        other = Model()
        job.shard(other, make_optimizer(other), layers=Block, group=group)
    return optimizer, schedulers


def schedule(optimizer) -> list:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2)] if "schedulers" in FEATURES else []


def main() -> None:
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = Model()
    if "torch.compile" in FEATURES:
        model.compile(backend="eager")
    optimizer, schedulers = elastic(job, model)
    if "copies of parameters in job.state" in FEATURES:
        job.state["average"] = [p.detach().clone() for p in model.parameters()]
    loader = job.loader(
        Stream() if "an IterableDataset" in FEATURES else rows(),
        batch_size=8,
        accumulate=2 if ACCUMULATES else 1,
        weight=torch.numel if "losses weighted by tokens" in FEATURES else None,
        max_batch_size=16 if "a batch that grows" in FEATURES else None,
    )
    for _ in job.epochs(3):
        for x in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled="mixed precision" in FEATURES):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            if job.stepping:
                if "clipping" in FEATURES:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if "step(closure)" in FEATURES:
                    optimizer.step(loss.detach)
                optimizer.step()
                optimizer.zero_grad()
                for average, p in zip(job.state.get("average", ()), model.parameters()):
                    average.lerp_(p.detach(), 0.1)
        for scheduler in schedulers:
            scheduler.step()
        if "evaluation and reductions" in FEATURES:
            with torch.no_grad():
                losses = [
                    nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) for x in held_out(job)
                ]
            assert job.mean(torch.stack(losses).mean()) > 0
        if "checkpoints" in FEATURES:
            assert job.checkpoint()
    print("trained")


def held_out(job):
    return job.eval_loader(rows(), 4)


if __name__ == "__main__":
    main()
