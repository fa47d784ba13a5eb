"""Training scripts as people write them, for the tests: WAY names one of them. Each worker writes rows of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import shoal.torch as shoal
import torch
from torch import nn

WAY = os.environ["WAY"]
HERE = Path(os.environ["WAY_DIR"])
ME = os.environ.get("SHOAL_WORKER", "alone")
SAMPLES = 120


def said(name: str) -> bool:
    return (HERE / name).exists() or (HERE / f"{name}.{ME}").exists()


def until_said(name: str) -> None:
    while not said(name):
        time.sleep(0.01)


def write(**row) -> None:
    with open(HERE / f"rows.{ME}", "a") as file:
        file.write(json.dumps(row) + "\n")


def pace(job, slow_from: int = 0) -> None:
    """Leave the test time to change the workers, until it says that this is over."""
    if not said("hurry") and job.position.step >= slow_from:
        time.sleep(0.05)


class Numbers(torch.utils.data.Dataset):
    """Sequences of different lengths: (index, inputs, targets, mask)."""

    def __init__(self, length: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 6, 8, generator=generator)
        self.y = self.x.sum(2).tanh()
        lengths = torch.randint(1, 7, (length,), generator=generator)
        self.mask = torch.arange(6)[None, :] < lengths[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return i, self.x[i], self.y[i], self.mask[i]


def net(inputs: int = 8, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def token_loss(model: nn.Module, x, y, mask):
    """A mean over the tokens of this worker's part."""
    error = (model(x).squeeze(2) - y).square()
    return (error * mask).sum() / mask.sum()


def total(model: nn.Module) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def tokens() -> None:
    """Losses weighted by tokens: by the loader, with accumulation, and with batches drawn ahead, as HF Trainer does."""
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = os.environ["TOKENS"]
    accumulate = 1 if kind == "plain" else 3
    model, optimizer = job.wrap(model, optimizer)
    loader = job.loader(
        Numbers(),
        batch_size=7,
        accumulate=accumulate,
        weight=lambda batch: batch[3].sum(),
        loss="sum" if kind == "sum" else "mean",
    )
    for _ in job.epochs(6):
        batches = iter(loader)
        while True:
            drawn = []
            for batch in batches:
                drawn.append(batch)
                if job.stepping or kind in ("plain", "accumulate"):
                    break
            if not drawn:
                break
            everyone = job.sum(job.amount) if kind == "sum" else job.amount
            if kind == "ahead":
                job.weigh(job.amount)
            for _, x, y, mask in drawn:
                loss = token_loss(model, x, y, mask)
                if kind in ("ahead", "sum"):
                    loss = loss * mask.sum() / max(everyone, 1)
                loss.backward()
            if job.stepping:
                optimizer.step()
                optimizer.zero_grad()
                if job.is_main:
                    write(step=job.position.step, sum=total(model), size=job.world_size)
                pace(job)
    write(final=total(model), step=job.position.step)


def gan() -> None:
    """Two models, two optimizers, alternating updates; the discriminator has two backward passes per update."""
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    generator, critic = net(4, 8), net(8, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=3e-3) for m in (generator, critic)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 5, gamma=0.9) for o in optimizers]
    (generator, critic), (g_optimizer, c_optimizer) = job.wrap(
        models=[generator, critic], optimizers=optimizers, schedulers=schedulers
    )
    job.state["count"] = 0
    reduced = torch.Tensor.sum if os.environ.get("LOSS") == "sum" else torch.Tensor.mean
    die_at = int(os.environ.get("DIE_AT", "0"))
    for _ in job.epochs(int(os.environ.get("EPOCHS", "6"))):
        for _, x, _, _ in LOADER(job):
            real, noise = x[:, 0], x[:, 1, :4]  # the noise belongs to the sample: the same at any size
            fake = generator(noise)
            c_optimizer.zero_grad()
            reduced(nn.functional.softplus(-critic(real))).backward()
            reduced(nn.functional.softplus(critic(fake.detach()))).backward()
            c_optimizer.step()
            schedulers[1].step()
            if die_at and ME == "w1" and job.position.step == die_at:
                until_said("die")
                os.kill(os.getpid(), 9)
            g_optimizer.zero_grad()
            loss = reduced(nn.functional.softplus(-critic(fake)))
            loss.backward()
            g_optimizer.step()
            schedulers[0].step()
            job.state["count"] += 1
            job.log(loss=loss)
            if job.is_main:
                sums = [total(generator), total(critic)]
                write(step=job.position.step, sums=sums, size=job.world_size, loss=loss.item())
            pace(job)
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    write(
        final=[total(generator), total(critic)], step=job.position.step, rates=rates, count=job.state["count"]
    )


def by_hand() -> None:
    """Gradients of two batches are added up, without the loader's `accumulate`."""
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.001))
    reduced = torch.Tensor.sum if os.environ.get("LOSS") == "sum" else torch.Tensor.mean
    for _ in job.epochs(6):
        for _, x, y, _ in LOADER(job):
            error = model(x).squeeze(2) - y
            if job.position.step % 4 == 3:  # the gradient of the first layer is only that from before
                error = model[1:](model[0](x).detach()).squeeze(2) - y
            reduced(error.square()).backward()
            if job.position.step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
                if job.is_main:
                    write(step=job.position.step, sum=total(model), size=job.world_size)
            pace(job)
    write(final=total(model), step=job.position.step)


def freezes() -> None:
    """The first layer is frozen from the third epoch on."""
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = job.loader(Numbers(), batch_size=14)
    for epoch in job.epochs(8):
        if epoch == 2:
            model[0].requires_grad_(False)
        for _, x, y, _ in loader:
            train_step(job, model, optimizer, x, y)
            if job.is_main:
                write(epoch=epoch, step=job.position.step, size=job.world_size)
    write(final=total(model), first=total(model[0]), step=job.position.step)


LOADERS: dict[int, object] = {}


def LOADER(job):
    if id(job) not in LOADERS:
        LOADERS[id(job)] = job.loader(Numbers(), batch_size=14, loss=os.environ.get("LOSS"))
    return LOADERS[id(job)]


def train_step(job, model, optimizer, x, y) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).squeeze(2), y)
    loss.backward()
    optimizer.step()
    job.log(loss=loss)
    pace(job)
    return loss


def evaluated() -> None:
    """All workers evaluate, and take decisions with the same numbers. One may die while it evaluates."""
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
    model, optimizer = job.wrap(model, optimizer, schedulers=[plateau])
    loader = job.loader(Numbers(), batch_size=14)
    held_out = job.eval_loader(Numbers(101), batch_size=7)
    job.state["best"] = float("inf")
    for epoch in job.epochs(40):
        for _, x, y, _ in loader:
            train_step(job, model, optimizer, x, y)
        errors, ids = [], []
        with torch.no_grad():
            for i, x, y, _ in held_out:
                errors += (model(x).squeeze(2) - y).square().mean(1).tolist()
                ids += i.tolist()
                if ME == "w1" and said("dies"):
                    os.kill(os.getpid(), 9)
        error = job.mean(sum(errors) / max(1, len(errors)))
        plateau.step(error)
        everyone = [i for part in job.gather(ids) for i in part]
        job.state["best"] = min(job.state["best"], error)
        if job.is_main:
            write(
                epoch=epoch,
                error=error,
                seen=sorted(everyone),
                size=job.world_size,
                rate=optimizer.param_groups[0]["lr"],
            )
        if job.any(epoch == 30 and job.is_main):
            break
    write(final=total(model), best=job.state["best"], rate=optimizer.param_groups[0]["lr"], epoch=epoch)


def reduced() -> None:
    """Exact over uneven parts: what the workers have together is what one process has."""
    job = shoal.init()
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Numbers(), batch_size=7, shuffle=False)
    for _ in job.epochs(1):
        for i, x, y, _ in loader:
            loss = train_step(job, model, optimizer, x, y)
            counted = i.double()[: int(job.amount)]
            write(
                step=job.position.step,
                mean=job.mean(counted.mean() if job.amount else torch.tensor(float("nan")).double()).item(),
                loss=job.mean(loss.item()),
                sum=job.sum(int(counted.sum())),
                tensor=job.sum(torch.tensor([job.amount, 1.0])).tolist(),
                gathered=sorted(v for part in job.gather(counted.tolist()) for v in part),
                any=[job.any(job.rank == 1), job.any(False)],
                broadcast=job.broadcast({"rank": job.rank}),
                made=job.broadcast(lambda: ME),
            )
            until_said("hurry")


def micro_means() -> None:
    """Means of micro-batches. In the last one of an epoch only one worker has a part: sample 31."""
    job = shoal.init()
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = (lambda batch: batch[0].square().sum()) if os.environ["WEIGHT"] == "squares" else None
    loader = job.loader(Numbers(32), batch_size=31, accumulate=2, shuffle=False, weight=weight)
    for _ in job.epochs(3):
        for i, x, y, _ in loader:
            nn.functional.mse_loss(model(x).squeeze(2), y).backward()
            x = i.double()
            mean = (x * x * x).sum() / (x * x).sum() if weight else x.mean()
            write(mean=job.mean(mean).item())
            if job.stepping:
                job.log(mean=mean)
                optimizer.step()
                optimizer.zero_grad()


def weighted_means() -> None:
    """What `job.mean` weighs by: the last evaluation or the last batch, whichever came later."""
    job = shoal.init()
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Numbers(), batch_size=7, shuffle=False)
    held_out = job.eval_loader(list(range(31)), batch_size=4)

    def evaluation() -> float:
        own = [float(i) for part in held_out for i in part]
        return job.mean(sum(own) / len(own) if own else 0.0)

    for _ in job.epochs(2):
        for _, x, y, _ in loader:
            train_step(job, model, optimizer, x, y)
            within = evaluation()
            if job.position.step in (3, 20):
                break
            write(within=within, batch=job.mean(0.0, weight=1.0))
        write(left=evaluation(), evaluated=job.evaluate(held_out, lambda part: part.double().mean()))


def lost_in_evaluate() -> None:
    """A worker dies in its last batch of an evaluation, or right after its results have been exchanged."""
    job = shoal.init()
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Numbers(), batch_size=12)
    held_out = job.eval_loader(list(range(31)), batch_size=4)

    def step(part):
        if ME == "w1" and os.environ["DIES"] == "within" and int(part[0]) > 15 and job.position.epoch == 1:
            os.kill(os.getpid(), 9)
        return {"mean": part.double().mean(), "ones": 1.0}

    for _ in job.epochs(3):
        for _, x, y, _ in loader:
            train_step(job, model, optimizer, x, y)
        found = job.evaluate(held_out, step)
        if ME == "w1" and os.environ["DIES"] == "after" and job.position.epoch == 1:
            os.kill(os.getpid(), 9)
        write(**found, all=held_out.collect(lambda part: part.tolist()))


def many_logs() -> None:
    job = shoal.init()
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for _, x, y, _ in loader:
            train_step(job, model, optimizer, x, y)
            job.log(**{f"value {i}": float(job.rank) for i in range(40)}, count=job.rank, flag=job.rank == 1)
            if job.position.step == 19:
                job.log(final=7.0)


def compiled() -> None:
    """torch.compile: the number of graphs before and after each change of workers."""
    from torch._dynamo.utils import counters

    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = torch.compile(net(), backend=os.environ["BACKEND"])
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Numbers(), batch_size=14)
    for _ in job.epochs(12):
        for _, x, y, _ in loader:
            loss = job.mean(train_step(job, model, optimizer, x, y)).item()
            graphs = counters["stats"]["unique_graphs"]
            if job.weight:
                write(step=job.position.step, size=job.world_size, graphs=graphs, part=len(x), loss=loss)
    write(final=total(model), step=job.position.step)


class Backwards:
    """A script's own sampler: the last samples first, and each odd one twice."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        chosen = [i for i in range(SAMPLES) if i % 2] * 2
        return iter(sorted(chosen, reverse=True))


def collate(samples):
    return [torch.stack([torch.as_tensor(v) for v in values]) for values in zip(*samples)] + ["collated"]


def options() -> None:
    """Options of a DataLoader."""
    given = {
        "drop_last": {"drop_last": True},
        "persistent_workers": {"num_workers": 1, "persistent_workers": True},
        "sampler": {"sampler": Backwards()},
        "weighted": {"sampler": torch.utils.data.WeightedRandomSampler(torch.arange(SAMPLES).double(), 60)},
        "collate_fn": {"collate_fn": collate},
    }[os.environ["OPTION"]]
    job = shoal.init(checked=True)
    torch.manual_seed(0)
    model = net()
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Numbers(), batch_size=14, **given)
    for epoch in job.epochs(4):
        for i, x, y, _, *rest in loader:
            train_step(job, model, optimizer, x, y)
            if job.amount:
                write(epoch=epoch, step=job.position.step, ids=i.tolist(), rest=rest, size=job.world_size)
    write(final=total(model), step=job.position.step)


if __name__ == "__main__":
    globals()[WAY]()
    sys.stdout.flush()
