"""How fast is the control plane? Measure submissions and events through the API and the store, with fake workers.

A server process has 10,000 GPUs whose workers do nothing. Workers of live jobs speak the real wire protocol, workers
of commands are entries in a table. This process submits 1,000 jobs over HTTP, then keeps 1,000 active while jobs
end one after another, until the store has 10,000 events. Latency is measured from the first event that led to a
decision (an exit, a submission) until the decision's commands are in the store and passed to the executor.

    python bench/control_plane.py [--jobs 1000] [--events 10000] [--nodes 1250] [--live 10] [--policy afs-l]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

GPUS_PER_NODE = 8


def serve(options: argparse.Namespace) -> None:
    """Run the server process. It prints its address and, at the end of its input, its measurements."""
    import uvicorn

    from server.fakes import Fleet
    from shoal.executors.base import NodeInfo
    from shoal.server.api.app import make_app
    from shoal.server.api.limits import Buckets
    from shoal.server.control import Control
    from shoal.server.http_server import HttpServer
    from shoal.server.options import Options, bind
    from shoal.server.serve import quiet_memory

    async def run() -> None:
        nodes = tuple(NodeInfo(f"n{i}", GPUS_PER_NODE, "gpu", True) for i in range(options.nodes))
        fleet = Fleet(nodes)
        fleet.checks_gpus = False
        control = Control(Options(Path(options.home), policy=options.policy), executor=fleet)
        # One client stands for many users here, so the limit of one client does not apply.
        app = make_app(control.services, Buckets(1e9, 1e9))
        sock = bind("127.0.0.1", 0, None)
        await control.start(sock)
        server = HttpServer(uvicorn.Config(app, log_config=None, lifespan="off"))
        serving = await server.start(sock)
        loop, rng = control.loop, random.Random(0)
        quiet_memory()
        token = control.home.admin_token.read_text().strip()
        print(json.dumps({"address": control.process.address, "token": token}), flush=True)
        mode = {"end": False, "stop": False}

        def listen() -> None:
            for line in sys.stdin:
                if line.strip() == "go":
                    loop.latencies_s.clear()
                    mode["end"] = True
            mode["stop"] = True

        threading.Thread(target=listen, daemon=True).start()
        turn = 0
        stepped: dict[str, float] = {}
        while not mode["stop"] and not serving.done():
            await asyncio.sleep(0.005)
            turn += 1
            for worker in list(fleet.live.values()):  # each reports about twice a second, as real workers do
                leads = worker.member.members[:1] == (worker.id,)
                if leads and time.monotonic() - stepped.get(worker.job, 0.0) > 0.5:
                    stepped[worker.job] = time.monotonic()
                    fleet.step(int(worker.job), total=10**9)
                    break  # one job per turn: real workers do not block the loop
            # A job ends only after another was submitted, so the number of active jobs stays the same.
            if not mode["end"] or turn % 4 or len(loop.jobs) < options.jobs:
                continue
            running = [j for j in loop.jobs.values() if j.resize.value == "never" and j.workers and j.gpus]
            if running:
                for worker in list(rng.choice(running).workers):
                    fleet.end(worker)
        latencies = np.array(loop.latencies_s) * 1e3
        registry, by = loop.metrics.registry, {"policy": options.policy}
        decisions = registry.get_sample_value("shoal_decision_seconds_count", by) or 1.0
        decisions_s = registry.get_sample_value("shoal_decision_seconds_sum", by) or 0.0
        process = psutil.Process()
        result = {
            "event_to_command_ms": {
                "count": len(latencies),
                "p50": float(np.percentile(latencies, 50)),
                "p99": float(np.percentile(latencies, 99)),
                "max": float(latencies.max()),
            },
            "decision_ms_mean": 1e3 * decisions_s / decisions,
            "active_jobs": len(loop.jobs),
            "gpus": loop.cluster.total_gpus,
            "used_gpus": loop.devices.used,
            "live_workers_on_the_wire": len(fleet.live),
            "failed_jobs": control.store.count_jobs().get("failed", 0),
            "events": control.store.last_event()[0],
            "jobs": sum(control.store.count_jobs().values()),
            "resident_mb": process.memory_info().rss / 1e6,
        }
        size = control.store.size_bytes()
        result |= {"store_mb": size / 1e6, "store_bytes_per_job": size / result["jobs"]}
        print(json.dumps(result), flush=True)
        os._exit(0)

    asyncio.run(run())


def submit(http: httpx.Client, i: int, live: int) -> None:
    if i < live:
        spec: dict[str, Any] = {"gpus": "2..10", "resize": "live", "iterations": 1e9}
    else:
        spec = {"gpus": "10", "expected_s": 100.0 + i % 977}
    reply = http.post("/jobs", json={"command": ["train"], "workdir": "/tmp", **spec})
    if reply.status_code != 201:
        raise SystemExit(f"submission {i}: {reply.status_code} {reply.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--live", type=int, default=10)
    parser.add_argument("--policy", default="afs-l")
    parser.add_argument("--home", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.home:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, __file__, "--home", home, "--nodes", str(options.nodes)]
        command += ["--policy", options.policy, "--jobs", str(options.jobs)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        at = json.loads(child.stdout.readline())
        headers = {"Authorization": f"Bearer {at['token']}"}
        http = httpx.Client(base_url=f"{at['address']}/api/v1", headers=headers, timeout=120)
        began = time.perf_counter()
        for i in range(options.jobs):
            submit(http, i, options.live)
        submissions_s = time.perf_counter() - began
        time.sleep(2.0)  # let the last jobs start
        before = http.get("/status").json()
        child.stdin.write("go\n")
        child.stdin.flush()
        began, extra = time.perf_counter(), 0
        while True:
            status = http.get("/status").json()
            if status["last_event"] >= options.events + before["last_event"]:
                break
            active = sum(status["jobs"].get(s, 0) for s in ("pending", "starting", "running"))
            for _ in range(min(options.jobs - active, 50)):
                submit(http, options.jobs + extra, 0)
                extra += 1
            time.sleep(0.1)
        churn_s = time.perf_counter() - began
        child.stdin.close()
        result = json.loads(child.stdout.readline())
        child.wait()
    print(
        json.dumps(
            {
                "machine": {
                    "cpus": os.cpu_count(),
                    "python": platform.python_version(),
                    "load": os.getloadavg()[0],
                },
                "policy": options.policy,
                "submissions_per_s": options.jobs / submissions_s,
                "events_per_s_under_load": (result["events"] - before["last_event"]) / churn_s,
                **result,
                "target": {"event_to_command_ms_p99": 100},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
