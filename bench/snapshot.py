"""Time to encode, write and restore the snapshot of a scheduler: python bench/snapshot.py --jobs 1000."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from shoal.core.cluster import Cluster
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy
from shoal.scheduler.saved import restore
from shoal.scheduler.scheduler import Scheduler
from shoal.server.loop import snapshot
from shoal.server.store.store import Store


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--policy", default="afs-l")
    given = options.parse_args()
    scheduler = Scheduler(Cluster.of(125, 8), make_policy(given.policy))
    profile = Profile.of("m", {n: n**-0.8 for n in range(1, 9)})
    jobs = [
        Job(f"j{i}", 0.0, GpuRange(1, 8), 4, f"u{i % 20}", iterations=100.0 + i) for i in range(given.jobs)
    ]
    scheduler.step(0.0, [Submitted(i, job, profile) for i, job in enumerate(jobs)])
    with tempfile.TemporaryDirectory() as home:
        store = Store(f"sqlite:///{Path(home) / 'store'}")
        for turn in range(6):
            began = time.perf_counter()
            value = snapshot.encode(scheduler)
            encoded = time.perf_counter()
            with store.change(0.0) as change:
                change.put(snapshot.KEY, value)
            written = time.perf_counter()
            saved = snapshot.decode(store.get(snapshot.KEY))
            restore(saved, scheduler.cluster, make_policy(given.policy), scheduler.jobs, scheduler.profiles)
            restored = time.perf_counter()
            if turn:
                print(
                    f"{given.jobs} jobs, {len(value['text'])} bytes: encode {1e3 * (encoded - began):.1f} ms, "
                    f"write {1e3 * (written - encoded):.1f} ms, restore {1e3 * (restored - written):.1f} ms"
                )
        store.close()


if __name__ == "__main__":
    main()
