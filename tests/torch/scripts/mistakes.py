"""Ordinary mistakes in training scripts, for the tests: WAY names one of them."""

from __future__ import annotations

import os
import sys

from ways import HERE, ME, WAY, Numbers, net, pace, said, total, until_said, write

import shoal.torch as shoal
import torch
from torch import nn


def setup(schedule=None, register: bool = False):
    job = shoal.init()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedule(optimizer) if schedule is not None else None
    schedulers = [scheduler] if register else []
    model, optimizer = job.wrap(model, optimizer, schedulers=schedulers)
    return job, model, optimizer, scheduler


def train(job, model, optimizer, batch) -> torch.Tensor:
    _, x, y, _ = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).squeeze(2), y)
    loss.backward()
    optimizer.step()
    job.log(loss=loss)
    pace(job)
    return loss


def error_of(model) -> float:
    with torch.no_grad():
        data = Numbers()
        return nn.functional.mse_loss(model(data.x).squeeze(2), data.y).item()


def plain_loader() -> None:
    job, model, optimizer, _ = setup()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)


def passes_within_an_epoch() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for _ in range(3):
            for batch in loader:
                train(job, model, optimizer, batch)


def second_loop() -> None:
    """A warm-up, and then the training."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epochs in (1, 4):
        for _ in job.epochs(epochs):
            for batch in loader:
                train(job, model, optimizer, batch)


def pass_after_the_end() -> None:
    """A test on the training data, of which each worker would have a part of an epoch that nobody asked for."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
    for batch in loader:
        train(job, model, optimizer, batch)


def plain_range() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in range(4):
        for batch in loader:
            train(job, model, optimizer, batch)


def own_mesh() -> None:
    shoal.init()
    from torch.distributed.fsdp import fully_shard

    fully_shard(net())


def unregistered_schedule() -> None:
    job, model, optimizer, scheduler = setup(lambda o: torch.optim.lr_scheduler.StepLR(o, 6))
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
        scheduler.step()


def unregistered_plateau() -> None:
    """It leaves no mark on its optimizer."""
    job, model, optimizer, scheduler = setup(torch.optim.lr_scheduler.ReduceLROnPlateau)
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
        scheduler.step(job.broadcast(lambda: error_of(model)))


def unregistered_scaler() -> None:
    """A newcomer would scale its losses by the first factor, and the others by one that has grown."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    for _ in job.epochs(2):
        for _, x, y, _ in loader:
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(x).squeeze(2), y)).backward()
            scaler.step(optimizer)
            scaler.update()


def unregistered_average() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        average.update_parameters(model)


def own_schedule() -> None:
    """A newcomer's counter begins when it rehearses: its rate changes at another epoch than the others'."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    mine = [0]
    for epoch in job.epochs(30):
        if epoch == 2 and not job.rehearsing:
            until_said("grown")  # the newcomer is ready: it joins in this epoch
        for batch in loader:
            train(job, model, optimizer, batch)
        mine[0] += 1
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (mine[0] // 3)


def mean_before_epochs() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    offset = job.broadcast(float(ME[1:]))
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
    write(offset=offset)


def rank_before_epochs() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    if job.rank == 0:
        (HERE / "log.csv").write_text("epoch\n")
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)


def world_size_before_epochs() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12 * job.world_size)
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)


def lost_after_its_part() -> None:
    """It has evaluated its part, and takes the result with it."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    held_out = job.eval_loader(Numbers(20), batch_size=4)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        ones = sum(len(x) for _, x, _, _ in held_out)
        if ME == "w1":
            os.kill(os.getpid(), 9)
        write(mean=job.sum(ones) / 20)


def plateau_on_main() -> None:
    job, model, optimizer, scheduler = setup(torch.optim.lr_scheduler.ReduceLROnPlateau, register=True)
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.is_main:
            scheduler.step(error_of(model))


def stop_on_main() -> None:
    """Early stopping that only rank 0 decides."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.is_main and epoch == 1:
            break


def stop_before_a_decision() -> None:
    """The others begin the next epoch with an exchange, and not with a step."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        job.broadcast(epoch)
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.rank == 1 and epoch == 1:
            break


def break_on_one() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if job.rank == 1 and (epoch, step) == (1, 4):
                break


def return_on_one() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if job.rank == 1 and (epoch, step) == (1, 4):
                return


def break_to_evaluate() -> None:
    """The worker that left waits for the others' values, and they wait for its gradients."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if job.rank == 1 and (epoch, step) == (1, 4):
                break
        job.mean(error_of(model))


def mean_on_main() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for batch in loader:
            loss = train(job, model, optimizer, batch)
        if job.is_main:
            job.mean(loss)


def break_in_evaluation() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    held_out = job.eval_loader(Numbers(20), batch_size=4)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        for _ in held_out:
            if ME == "w1":
                break
        job.mean(error_of(model))


def different_reductions() -> None:
    """Sums and means have the same form on the way."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
        (job.mean if ME == "w1" else job.sum)(error_of(model))


def sum_loss() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for _, x, y, _ in loader:
            nn.functional.mse_loss(model(x).squeeze(2), y, reduction="sum").backward()
            optimizer.step()


def divided_loss() -> None:
    """A sum, divided by the size of the batch of all workers."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(30):
        for _, x, y, _ in loader:
            optimizer.zero_grad()
            ((model(x).squeeze(2) - y).square().mean(1).sum() / 12).backward()
            optimizer.step()
            pace(job)


def changed_model() -> None:
    job, model, optimizer, _ = setup()
    model[2] = nn.Linear(16, 1)
    optimizer.add_param_group({"params": model[2].parameters()})
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)


def step_on_one() -> None:
    """One worker leaves an update out, by its own loss."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, (_, x, y, _) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(2), y).backward()
            if job.rank == 0 or (epoch, step) != (1, 4):
                optimizer.step()


def evaluate_after_the_end() -> None:
    """A last evaluation after the last epoch, on all workers, on one of them, or one is lost in it."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    held_out = job.eval_loader(list(range(31)), batch_size=4)
    for _ in job.epochs(2):
        for batch in loader:
            train(job, model, optimizer, batch)
    if os.environ["EVALUATES"] == "main" and not job.is_main:
        return

    def mean(part) -> torch.Tensor:
        if os.environ["EVALUATES"] == "until lost" and ME == "w1":
            os.kill(os.getpid(), 9)
        return part.double().mean()

    write(first=job.is_first, mean=job.evaluate(held_out, mean))


def errors_leave_batches_out() -> None:
    """A script that leaves out what needs too much memory also leaves out that the workers have come apart."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(2):
        for step, (_, x, y, _) in enumerate(loader):
            optimizer.zero_grad()
            try:
                nn.functional.mse_loss(model(x).squeeze(2), y).backward()
            except RuntimeError:
                if os.environ["THEN"] == "return":
                    return
                continue
            if job.rank == 0 or (epoch, step) != (1, int(os.environ["STEP"])):
                optimizer.step()


def errors_end_epochs() -> None:
    job, model, optimizer, scheduler = setup(torch.optim.lr_scheduler.ReduceLROnPlateau, register=True)
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(3):
        try:
            for batch in loader:
                train(job, model, optimizer, batch)
        except RuntimeError:
            pass
        if job.is_main and epoch == 0:
            scheduler.step(error_of(model))


def gan_step_on_one() -> None:
    """One worker leaves an update of the critic out, by its own loss."""
    job = shoal.init()
    torch.manual_seed(0)
    generator, critic = net(4, 8), net(8, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic)]
    job.wrap(models=[generator, critic], optimizers=optimizers)
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, (_, x, _, _) in enumerate(loader):
            fake = generator(x[:, 1, :4])
            optimizers[1].zero_grad()
            nn.functional.softplus(critic(fake.detach()) - critic(x[:, 0])).mean().backward()
            if job.rank == 0 or (epoch, step) != (1, 4):
                optimizers[1].step()
            optimizers[0].zero_grad()
            nn.functional.softplus(-critic(fake)).mean().backward()
            optimizers[0].step()


def best_weights_on_main() -> None:
    """Main returns to its best weights."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    best = {k: v.clone() for k, v in model.state_dict().items()}
    for epoch in job.epochs(4):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.is_main and epoch == 1:
            model.load_state_dict(best)


def clips_on_one() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, (_, x, y, _) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(2), y).backward()
            if job.rank == 1 and (epoch, step) == (1, 4):
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()


def freeze_on_one() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        if job.rank == 1 and epoch == 1:
            model[0].requires_grad_(False)
        for batch in loader:
            train(job, model, optimizer, batch)


def critic_unwrapped() -> None:
    """Only the generator is given to the job."""
    job, generator, optimizer, _ = setup()
    critic = net(6, 1)
    own = torch.optim.Adam(critic.parameters(), lr=1e-3)
    loader = job.loader(Numbers(), batch_size=12)
    for _ in job.epochs(2):
        for batch in loader:
            own.zero_grad()
            critic(torch.randn(4, 6)).mean().backward()
            own.step()
            train(job, generator, optimizer, batch)


def second_optimizer() -> None:
    """A new optimizer for the second half of the training."""
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(2):
        if epoch == 1:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for batch in loader:
            train(job, model, optimizer, batch)


# Mistakes that the runtime makes right


class Shuffled(torch.utils.data.IterableDataset):
    """In an order of the worker's own random state, or of the epoch."""

    def __init__(self, seeded: bool) -> None:
        self.numbers, self.seeded, self.epoch = Numbers(), seeded, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch if self.seeded else ord(ME[-1]))
        return (self.numbers[i] for i in torch.randperm(len(self.numbers), generator=generator).tolist())


def shuffled_stream() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Shuffled(os.environ["SEEDED"] == "yes"), batch_size=12)
    for _ in job.epochs(3):
        for batch in loader:
            train(job, model, optimizer, batch)


def best_on_main() -> None:
    """Only main sets the best value so far. It dies, and the next main must know the value."""
    job, model, optimizer, _ = setup()
    job.state["best"] = float("inf")
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(6):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if ME == "w0" and (epoch, step) == (3, 2):
                until_said("die")
                os.kill(os.getpid(), 9)
        if job.is_main:
            error = error_of(model)
            write(epoch=epoch, error=error, before=job.state["best"])
            job.state["best"] = min(error, job.state["best"])


def best_on_main_within_an_epoch() -> None:
    """Only main sets it, and dies some steps later, in the same epoch."""
    job, model, optimizer, _ = setup()
    job.state["best"] = float("inf")
    loader = job.loader(Numbers(), batch_size=3)
    for epoch in job.epochs(2):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if (epoch, step) == (0, 10) and job.is_main:
                job.state["best"] = 0.5
            if (epoch, step) == (0, 20) and ME == "w0":
                until_said("die")
                os.kill(os.getpid(), 9)
    write(best=job.state["best"])


def own_sums() -> None:
    """A value of each worker's own, which differs in every step."""
    job, model, optimizer, _ = setup()
    job.state["sum"] = 0.0
    loader = job.loader(Numbers(), batch_size=3)
    for _ in job.epochs(3):
        for batch in loader:
            job.state["sum"] += train(job, model, optimizer, batch).item()
    write(given=job.parts.check._given, step=job.position.step)


def stop_together() -> None:
    job, model, optimizer, _ = setup()
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(4):
        for step, batch in enumerate(loader):
            train(job, model, optimizer, batch)
            if job.any(job.rank == 1 and (epoch, step) == (1, 4)):
                write(step=job.position.step, final=total(model))
                return


def first_lines() -> None:
    """What a script does before `job.epochs`: it truncates a file, and starts a logger."""
    job, model, optimizer, _ = setup()
    write(first=job.is_first, main=job.is_main)
    if job.is_first and job.is_main:
        (HERE / "log.csv").write_text("epoch\n")
    if job.once("logger"):
        write(logger=True)
    loader = job.loader(Numbers(), batch_size=12)
    for epoch in job.epochs(6):
        for batch in loader:
            train(job, model, optimizer, batch)
        if job.once("after one epoch"):
            write(once=epoch)
        if job.is_main:
            with open(HERE / "log.csv", "a") as file:
                file.write(f"{epoch}\n")
        if epoch == 1 and not job.rehearsing and not said("checkpointed"):
            job.checkpoint()
            if job.is_main:
                (HERE / "checkpointed").touch()
            until_said("go on")


if __name__ == "__main__":
    globals()[WAY]()
    sys.stdout.flush()
