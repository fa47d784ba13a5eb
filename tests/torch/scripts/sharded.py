"""A training script for the tests of sharded models: small and deterministic. It writes a row for each part."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from torch.utils.checkpoint import checkpoint

import shoal.torch as shoal
import torch
from torch import nn

OPTIONS = {
    "samples": 120,
    "batch": 12,
    "epochs": 4,
    "sleep_s": 0.0,
    "hidden": 10,
    "accumulate": 1,
    "clip": 0.0,
    "mixed": False,
    "activation": False,
    "copy_every": None,
    "group": None,
    "checked": True,
    "wrapped": False,
    "replicated": False,
    "tokens": False,
    "checkpoint_every": 0,
    "dies_in_sum": 0,
    **json.loads(os.environ.get("PROBE", "{}")),
}
HERE = Path(os.environ["PROBE_DIR"])
ME = os.environ.get("SHOAL_WORKER", "alone")


PADDING = 10


class Samples(torch.utils.data.Dataset):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randint(0, 11, (length, 5), generator=generator)
        if OPTIONS["tokens"]:  # sequences of different lengths: their ends are padding
            lengths = torch.randint(1, 5, (length,), generator=generator)
            self.x[torch.arange(5)[None, :] > lengths[:, None]] = PADDING

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return i, self.x[i]


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(hidden, 2 * hidden), nn.LayerNorm(hidden)
        self.second = nn.Linear(2 * hidden, hidden)

    def inner(self, h):
        return self.second(torch.tanh(self.first(self.norm(h))))

    def forward(self, h):
        if OPTIONS["activation"]:
            return h + checkpoint(self.inner, h, use_reentrant=False)
        return h + self.inner(h)


class Model(nn.Module):
    """Tied embeddings, a frozen layer, and sizes that no number of workers divides."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, hidden)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(3)])
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(hidden, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def die_in_sum(number: int) -> None:
    """End this worker when it has begun its n-th sum of gradients, in which the others wait for its part."""
    from shoal.torch.sharding.private import Collectives

    scatter, left = Collectives.reduce_scatter, [number]

    def scatter_or_die(self, output, whole, op=None):
        left[0] -= 1
        if left[0] == 0:
            self._wait = lambda work: os.kill(os.getpid(), signal.SIGKILL)
        return scatter(self, output, whole, op)

    Collectives.reduce_scatter = scatter_or_die


def main() -> None:
    o = OPTIONS
    if o["dies_in_sum"] and ME == "w1":
        die_in_sum(o["dies_in_sum"])
    torch.manual_seed(3)
    job = shoal.init(checked=o["checked"], checkpoint=str(HERE / "state.pt"))
    model = Model(o["hidden"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    if o["wrapped"]:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=job.mesh())
        fully_shard(model, mesh=job.mesh())
        parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    options = {}
    if o["mixed"]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if o["replicated"] or (o["wrapped"] and o["group"] is None):
        job.wrap(model, optimizer)
    else:
        job.shard(model, optimizer, group=o["group"], copy_every=o["copy_every"], **options)
    job.state["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    weight = (lambda batch: (batch[1][:, 1:] != PADDING).sum()) if o["tokens"] else None
    loader = job.loader(
        Samples(o["samples"]), batch_size=o["batch"], accumulate=o["accumulate"], weight=weight
    )
    ignored = PADDING if o["tokens"] else -100
    rows = open(HERE / f"steps.{ME}", "a")  # noqa: SIM115
    for epoch in job.epochs(o["epochs"]):
        for ids, x in loader:
            logits = model(x).float()
            targets = x[:, 1:].reshape(-1)
            loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), targets, ignore_index=ignored)
            (loss if o["tokens"] else loss / o["accumulate"]).backward()
            step = job.position.step
            if job.stepping:
                if o["clip"]:
                    nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
                optimizer.step()
                job.state["schedule"].step()
                optimizer.zero_grad()
            if job.parts.steps.counts:
                row = {
                    "step": step,
                    "epoch": epoch,
                    "generation": job.generation,
                    "weight": job.weight,
                    "loss": float(loss.detach()),
                    "ids": ids.tolist() if job.weight else [],
                }
                rows.write(json.dumps(row) + "\n")
                rows.flush()
            if o["checkpoint_every"] and job.is_main and (step + 1) % o["checkpoint_every"] == 0:
                job.checkpoint()
            job.log(loss=loss)
            if not (HERE / "hurry").exists():
                # The job must not end before the test says so, however slow a busy machine starts its workers.
                time.sleep(o["sleep_s"] if epoch < o["epochs"] // 2 else max(o["sleep_s"], 0.4))
    whole = (lambda p: p) if o["replicated"] else (lambda p: p.full_tensor())
    total = {name: float(whole(p.detach()).double().abs().sum()) for name, p in model.named_parameters()}
    (HERE / f"final.{ME}").write_text(json.dumps({"sums": total, "step": job.position.step}))


main()
