"""A training script for the tests: small and deterministic. It writes a row for each part of a step that counts."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import shoal.torch as shoal
import torch
from shoal.torch.session import Session
from shoal.torch.state import ModelState
from shoal.torch.vote import Vote
from torch import nn

OPTIONS = {
    "samples": 240,
    "batch": 16,
    "epochs": 4,
    "sleep_s": 0.01,
    "hidden": 32,
    "optimizer": "adam",
    "model": "plain",
    "accumulate": 1,
    "num_workers": 0,
    "checkpoint_every": 0,
    "gamma": 0.9,
    **json.loads(os.environ.get("PROBE", "{}")),
}
HERE = Path(os.environ["PROBE_DIR"])
ME = os.environ.get("SHOAL_WORKER", "alone")


def word(name: str) -> str | None:
    """What a test has told this worker, or all workers."""
    for path in (HERE / f"{name}.{ME}", HERE / name):
        if path.exists():
            return path.read_text()
    return None


class Samples(torch.utils.data.Dataset):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, 16, generator=generator)
        self.y = torch.tanh(self.x[:, :4].sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return i, self.x[i], self.y[i], os.getpid()


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self):
        return (self.samples[i] for i in range(len(self.samples)))


class Odd(nn.Module):
    """Frozen, unused and shared weights, as in real models."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, hidden)
        self.shared = nn.Linear(hidden, hidden)
        self.again = self.shared
        self.frozen = nn.Linear(hidden, hidden).requires_grad_(False)
        self.unused = nn.Linear(hidden, 3)
        self.last = nn.Linear(hidden, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.again(torch.tanh(self.frozen(self.shared(h))))))


def build(kind: str, hidden: int) -> nn.Module:
    if kind == "odd":
        return Odd(hidden)
    if kind == "deep":
        layers = [layer for _ in range(12) for layer in (nn.Linear(hidden, hidden), nn.Tanh())]
        return nn.Sequential(nn.Linear(16, hidden), *layers, nn.Linear(hidden, 1))
    if kind == "norm":
        return nn.Sequential(nn.Linear(16, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 1))
    if kind == "dropout":
        return nn.Sequential(nn.Linear(16, hidden), nn.Dropout(0.3), nn.Tanh(), nn.Linear(hidden, 1))
    return nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def digest(model: nn.Module, optimizer) -> str:
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().numpy().tobytes())
        for key in sorted(optimizer.state.get(p, {})):
            value = optimizer.state[p][key]
            sha.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode())
    return sha.hexdigest()[:16]


class Both:
    """Two collectives as one."""

    def __init__(self, *works) -> None:
        self.works = works

    def wait(self, timeout=None) -> None:
        for work in self.works:
            work.wait(timeout) if timeout else work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def in_halves(group, flat):
    """A custom synchronization."""
    (HERE / f"synced.{ME}.{group.size()}").touch()
    half = flat.numel() // 2
    return Both(group.allreduce([flat[:half]]), group.allreduce([flat[half:]]))


def die_holding(job, step: int, voted: bool) -> None:
    """w2 dies in this step when all hold its gradients: before the vote, or when w0 knows its result, but not w1."""
    cast, tally = Vote.cast, Vote.tally

    def at_hand(name: str) -> bool:
        (HERE / f"{name}.{ME}").touch()
        if ME == "w2":
            while not all((HERE / f"{name}.{other}").exists() for other in ("w0", "w1")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return ME != "w1"

    def casting(vote, fits) -> bool:
        if not voted and job.position.step == step:
            at_hand("holds")
        return cast(vote, fits)

    def tallying(vote, work, flag) -> bool:
        done = tally(vote, work, flag)
        return done and (
            at_hand("knows") if voted and (job.position.step, job.generation) == (step, 1) else True
        )

    Vote.cast, Vote.tally = casting, tallying


def kill_when_observing() -> None:
    """w2 kills w1 at its first early vote, and sees the next plan only when the holders have switched to it."""
    (HERE / f"pid.{ME}").write_text(str(os.getpid()))
    cast_early, committed_plan, voted = Vote.cast_early, Session.committed_plan, []

    def casting_early(vote, group, generation) -> None:
        cast_early(vote, group, generation)
        voted.append(generation)
        if len(voted) == 1:
            os.kill(int((HERE / "pid.w1").read_text()), signal.SIGKILL)

    if ME == "w2":
        Vote.cast_early = casting_early
        Session.committed_plan = lambda session: None if voted else committed_plan(session)


def main() -> None:
    torch.manual_seed(int(word("seed") or 0))
    job = shoal.init(checked=True, **({"sync": in_halves} if OPTIONS.get("halves") else {}))
    if word("fail_at_start"):
        raise MemoryError("cannot allocate a terabyte")
    if word("no_room"):
        ModelState.unpack = lambda *_: refuse_memory()
    o = OPTIONS
    model = build(o["model"], int(word("hidden") or o["hidden"]))
    if o["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model, optimizer = job.wrap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=o.get("lr_every", 50), gamma=o["gamma"])
    scaler = torch.amp.GradScaler("cpu", enabled=o.get("amp", False), init_scale=128.0)
    job.state["scheduler"], job.state["scaler"], job.state["count"] = scheduler, scaler, 0
    job.state["early"] = 0  # counted before backward
    average = torch.optim.swa_utils.AveragedModel(model) if o.get("average") else None
    if average is not None:
        job.state["average"] = average
    data = Samples(int(word("samples") or o["samples"]))
    loader = job.loader(
        Stream(data) if o.get("stream") else data,
        batch_size=o["batch"],
        max_batch_size=o.get("max_batch"),
        accumulate=o["accumulate"],
        num_workers=o["num_workers"],
    )
    if "die_holding" in o:
        die_holding(job, *o["die_holding"])
    if o.get("kill_when_observing"):
        kill_when_observing()
    out = open(HERE / f"steps.{ME}", "a")  # noqa: SIM115
    zeroed = False
    total_steps = o["epochs"] * -(-len(data) // (o["batch"] * o["accumulate"]))
    for epoch in job.epochs(o["epochs"]):
        for ids, x, y, pids in loader:
            job.state["early"] += 1
            dice = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.get("amp", False)):
                loss = nn.functional.mse_loss(model(x).float(), y) / o["accumulate"]
            make_mistakes(job, loss)
            if word("skip") and not job.rehearsing:
                continue
            if word("slow") and not job.rehearsing:
                time.sleep(0.04)
            if o.get("zero_late") and not zeroed:
                optimizer.zero_grad(set_to_none=False)
                zeroed = True
            scaler.scale(loss).backward()
            if not job.stepping:
                record(out, job, epoch, loss, ids, pids, dice, None)
                continue
            if o.get("decay"):
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.999)
            if o.get("clip"):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            zeroed = False
            if not o.get("zero_late"):
                optimizer.zero_grad()
            scheduler.step()
            if average is not None:
                average.update_parameters(model)
            job.state["count"] += 1
            job.log(loss=loss)
            record(out, job, epoch, loss, ids, pids, dice, (model, optimizer))
            if o["checkpoint_every"] and job.position.step % o["checkpoint_every"] == 0:
                job.checkpoint()
            if word("fail_in_step") and not job.rehearsing:
                raise ZeroDivisionError("the script divides by zero")
            while word("hang") and not job.rehearsing:
                time.sleep(0.05)
            if not (HERE / "hurry").exists():
                # The job must not end before the test says so, however slow a busy machine starts its workers.
                time.sleep(o["sleep_s"] if job.position.step < total_steps // 2 else 0.15)
        if o.get("save_epochs") and not job.rehearsing:
            job.checkpoint(HERE / f"saved.{ME}")
        while word("evaluate") and job.is_main:
            time.sleep(0.02)
    final = {
        "digest": digest(model, optimizer),
        "count": job.state["count"],
        "early": job.state["early"],
        "lr": scheduler.get_last_lr()[0],
        "average": digest(average, optimizer) if average is not None else "",
    }
    (HERE / f"final.{ME}").write_text(json.dumps(final))


def refuse_memory():
    raise MemoryError("no room for it")


def make_mistakes(job, loss) -> None:
    """Mistakes that a test asks for."""
    if job.rehearsing:
        return
    if word("fail_catching_up") and not job.weight:
        raise MemoryError("no room for the others' state")
    if word("exit"):
        sys.exit("that is enough")
    if word("fork") and not os.fork():
        sys.exit("this is only a child")
    if word("backward_twice"):
        loss.backward(retain_graph=True)


def record(out, job, epoch, loss, ids, pids, dice, models) -> None:
    if not job.weight:
        return
    row = {
        "step": job.position.step,
        "epoch": epoch,
        "weight": job.weight,
        "loss": loss.item(),
        "ids": ids.tolist(),
        "pids": sorted(set(pids.tolist())),
        "generation": job.generation,
        "size": job.world_size,
        "count": job.state["count"],
        "dice": dice,
    }
    if models and OPTIONS.get("digests"):
        row["digest"] = digest(*models)
    out.write(json.dumps(row) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
