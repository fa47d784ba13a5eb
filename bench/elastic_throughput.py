"""Two workers, one model twice: synchronised by Shoal and by plain DDP, in alternating steps of the same processes.

Alternating cancels what else the machine does. Both steps include their loader. A third kind of step is that of Shoal
without comparing `job.state` between the workers. Rank 0 writes one JSON document.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shoal.torch as shoal
import torch
from elastic_model import BATCH, Rows, build, optimizer_for
from elastic_timing import timed_s, train
from shoal.wire.messages import encode


def main() -> None:
    size, steps = os.environ["MODEL"], int(os.environ["STEPS"])
    data = Rows(size)
    job = shoal.init()
    model = build(size)
    model, optimizer = job.wrap(model, optimizer_for(model))
    job.state.update({f"value {i}": i / 7 for i in range(20)})
    loader = job.loader(data, batch_size=BATCH[size])
    ours = (x for _ in job.epochs(10**6) for x in loader)
    train(model, optimizer, ours)  # joined from here on

    plain = build(size)
    plain_optimizer = optimizer_for(plain)
    store = dist.FileStore(os.environ["STEP_LOG"] + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=2)
    ddp = DistributedDataParallel(plain)
    plain_loader = torch.utils.data.DataLoader(
        data, batch_size=BATCH[size] // 2, shuffle=True, drop_last=True
    )
    theirs = (x for _ in itertools.count() for x in plain_loader)

    hash_state = job.state.quick_hash

    def without_comparing() -> None:
        job.state.quick_hash = lambda: 0
        train(model, optimizer, ours)
        job.state.quick_hash = hash_state

    runs = {
        "shoal": lambda: train(model, optimizer, ours),
        "ddp": lambda: train(ddp, plain_optimizer, theirs),
        "uncompared": without_comparing,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _, order in zip(range(steps), itertools.cycle(itertools.permutations(runs))):
        for name in order:
            times[name].append(timed_s(runs[name]))
    hashes = [timed_s(hash_state) for _ in range(200)]
    # As at each epoch and change of workers.
    compares = [timed_s(lambda: job.parts.check._compare(bits=False)) for _ in range(50)]
    vote, worker = job.parts.vote, job.parts.worker
    votes = [timed_s(lambda: vote.cast(lambda _: True)) for _ in range(200)]
    # The control thread makes a report twice a second; at worst the training thread waits for it.
    reports = [timed_s(lambda: (encode(worker.report()), encode(worker.status()))) for _ in range(200)]
    if job.rank == 0:
        warm = {name: taken[5:] for name, taken in times.items()}
        result = {
            "shoal_step_ms": round(statistics.median(warm["shoal"]) * 1e3, 3),
            "ddp_step_ms": round(statistics.median(warm["ddp"]) * 1e3, 3),
            "throughput_vs_ddp": round(statistics.median(warm["ddp"]) / statistics.median(warm["shoal"]), 4),
            "throughput_vs_ddp_of_totals": round(sum(warm["ddp"]) / sum(warm["shoal"]), 4),
            "steps_each": len(warm["shoal"]),
            "uncompared_step_ms": round(statistics.median(warm["uncompared"]) * 1e3, 3),
            "compared_over_uncompared": round(
                statistics.median(warm["shoal"]) / statistics.median(warm["uncompared"]), 4
            ),
            "hash_of_state_us_per_step": round(statistics.median(hashes) * 1e6, 1),
            "compare_ms_per_epoch": round(statistics.median(compares) * 1e3, 3),
            "vote_ms_per_step": round(statistics.median(votes) * 1e3, 4),
            "reports_percent_of_time": round(statistics.median(reports) * 2 * 100, 4),
        }
        Path(os.environ["STEP_LOG"], "result.json").write_text(json.dumps(result))
    dist.barrier()


main()
