"""Sharded models in scripts as people write them, with their mistakes, for the tests: WAY names one of them."""

from __future__ import annotations

import os
import sys

from ways import HERE, ME, WAY, Numbers, pace, said, write

import shoal.torch as shoal
import torch
from torch import nn

GROUP = int(os.environ.get("GROUP", "0")) or None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h).squeeze(2)


def setup(every_s: float | None = None, checkpoint: str | None = None, **options):
    job = shoal.init(checkpoint_every_s=every_s, checkpoint=checkpoint)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.shard(model, optimizer, group=GROUP, **options)
    return job, model, optimizer


def train(job, model, optimizer, batch) -> torch.Tensor:
    _, x, y, _ = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    pace(job)
    return loss


def error(model, batch) -> torch.Tensor:
    _, x, y, _ = batch
    return nn.functional.mse_loss(model(x), y)


def totals(model) -> dict[str, float]:
    return {name: float(p.detach().full_tensor().double().sum()) for name, p in model.named_parameters()}


def uneven_evaluation() -> None:
    """Sizes that do not give all workers the same number of full batches, and fewer samples than workers."""
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    sizes = (21, 10, 3, 1)
    held_out = {n: job.eval_loader(Numbers(n), batch_size=10) for n in sizes}
    single = job.eval_loader(Numbers(5), batch_size=1)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        model.eval()
        found = {n: job.evaluate(held_out[n], lambda b: error(model, b)) for n in sizes}
        found["single"] = job.evaluate(single, lambda b: error(model, b))
        with torch.no_grad():
            own = [error(model, batch).item() * len(batch[1]) for batch in held_out[21]]
        found["loop"] = job.sum(sum(own)) / 21
        write(**{str(k): v for k, v in found.items()})
        model.train()


def too_few_samples() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    held_out = job.eval_loader(Numbers(1), batch_size=10)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        with torch.no_grad():
            for batch in held_out:
                error(model, batch)


def evaluated_on_main() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(3):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.is_main:
            with torch.no_grad():
                model(Numbers().x)


def evaluated_on_main_within_an_epoch() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(3):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if job.is_main and step == 4:
                with torch.no_grad():
                    model(Numbers().x)


def evaluated_on_main_at_the_end() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.is_main and epoch == 1:
            with torch.no_grad():
                model(Numbers().x)


def evaluated_in_broadcast() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(3):
        for batch in loader:
            train(job, model, optimizer, batch)
        job.broadcast(lambda: model(Numbers().x).sum().item())


def stop_on_one() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(3):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.rank == 1 and epoch == 0:
            break


def checkpoint_after_the_end() -> None:
    job, model, optimizer = setup(checkpoint=str(HERE / "late.pt"))
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(1):
        for batch in loader:
            train(job, model, optimizer, batch)
    job.checkpoint()


def failing_collective() -> None:
    """Not a mistake of the script: a collective that fails each time, though all workers are there."""
    from shoal.torch.sharding.private import Collectives

    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    real = Collectives._for

    def fail(self, tensor):
        if job.position.step >= 5:
            raise RuntimeError("no such kernel")
        return real(self, tensor)

    Collectives._for = fail
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)


def changed_model() -> None:
    job, model, optimizer = setup()
    model.extra = nn.Linear(8, 1)
    optimizer.add_param_group({"params": model.extra.parameters()})
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)


def no_zero_grad() -> None:
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12, weight=lambda batch: batch[3].sum())
    for _ in job.epochs(2):
        for batch in loader:
            error(model, batch).backward()
            optimizer.step()


def average_of_rows() -> None:
    job, model, optimizer = setup()
    job.state["average"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)


# What works


def best_and_last() -> None:
    """A checkpoint of the evaluated model at an epoch's end, others in the same step, and one before a break."""
    job, model, optimizer = setup(every_s=1e-9, checkpoint=str(HERE / "regular.pt"))
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
            if job.position.step == 4:
                job.checkpoint(HERE / "in_a_step.pt")
        write(epoch=epoch, step=job.position.step, totals=totals(model))
        if epoch == 1:
            job.checkpoint(HERE / "best.pt")
        if epoch == 2:
            if job.is_main:
                job.checkpoint(HERE / "last.pt")
            break


def lost_at_the_end_of_an_epoch() -> None:
    """A worker dies in an exchange between two epochs. The others return to copies, which are in the last epoch."""
    job, model, optimizer = setup(copy_every=4)
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(3):
        for batch in loader:
            loss = train(job, model, optimizer, batch)
            if job.parts.steps.counts:
                write(step=job.position.step, loss=loss.item() * job.weight, generation=job.generation)
        if epoch == 1 and ME == "w1" and said("dies"):
            os.kill(os.getpid(), 9)
        job.gather(epoch)
    write(final=totals(model), step=job.position.step)


def averaged_weights() -> None:
    """An average of the weights, as whole tensors in `job.state`."""
    job, model, optimizer = setup()
    average = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
    job.state["average"] = average
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(8):
        for batch in loader:
            train(job, model, optimizer, batch)
            for name, p in model.named_parameters():
                job.state["average"][name].lerp_(p.detach().full_tensor(), 0.1)
            if job.is_main:
                write(size=job.world_size)
    write(final={name: float(tensor.double().abs().sum()) for name, tensor in job.state["average"].items()})


def evaluated_first() -> None:
    """An evaluation before the first batch of each epoch: a newcomer comes to it while the others train."""
    job, model, optimizer = setup()
    loader = job.loader(Numbers(), batch_size=12)
    held_out = job.eval_loader(Numbers(21), batch_size=10)
    for epoch in job.epochs(30):
        found = job.evaluate(held_out, lambda b: error(model, b))
        if job.is_main:
            write(epoch=epoch, found=found, size=job.world_size)
        for batch in loader:
            train(job, model, optimizer, batch)


if __name__ == "__main__":
    globals()[WAY]()
    sys.stdout.flush()
