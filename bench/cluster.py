"""How does the control plane hold with many machines? 64 agents and 1,000 jobs, and two real agents that train.

The crowd: a server process, and 64 agents in a second process. They join over TLS, with tokens, as real ones do. Their
workers do nothing; those of live jobs speak the real wire protocol. Jobs end and are submitted all the time. Latency is
measured from the first event that led to a decision until the decision's commands are in the store and sent.
Then the server is killed and started again: how long until it has every agent and every worker back?

The pair: `shoal up` and two real agents, each with two virtual GPUs. An idle agent's CPU, the time from `run` to the
first step on a warm agent, and the time from a killed machine (agent, keepers and workers) to training again.

    python bench/cluster.py [--agents 64] [--jobs 1000] [--live 10] [--seconds 30] [--only crowd|pair]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
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

from _figures import print_figures

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
GPUS_PER_NODE = 8
IDLE_S = 15.0


# The crowd


def serve(options: argparse.Namespace) -> None:
    """The server process. It prints where it is, and its measurements for each line of its input."""
    import uvicorn

    from shoal.server.api.app import make_app
    from shoal.server.api.limits import Buckets
    from shoal.server.control import Control
    from shoal.server.http_server import HttpServer
    from shoal.server.options import Options, bind
    from shoal.server.serve import quiet_memory

    async def run() -> None:
        control = Control(Options(Path(options.serve), gpus=0, policy=options.policy))
        # One client stands for many users here, so the limit of one client does not apply.
        app = make_app(control.services, Buckets(1e9, 1e9))
        sock = bind("127.0.0.1", 0, None)
        await control.start(sock)
        server = HttpServer(uvicorn.Config(app, log_config=None, lifespan="off"))
        serving = await server.start(sock)
        quiet_memory()
        machines = control.machines
        assert machines is not None
        await machines.listening
        tokens = [machines.make_token(3600.0)[1] for _ in range(options.agents)]
        token = control.home.admin_token.read_text().strip()
        where = {"address": control.process.address, "token": token}
        print(json.dumps({**where, "control": machines.address, "join": tokens}), flush=True)
        loop, asked = control.loop, asyncio.Event()
        ours = asyncio.get_running_loop()

        def listen() -> None:
            for line in sys.stdin:
                if line.strip() == "clear":
                    loop.latencies_s.clear()
                else:
                    ours.call_soon_threadsafe(asked.set)

        threading.Thread(target=listen, daemon=True).start()
        while not serving.done():
            await asked.wait()
            asked.clear()
            print(json.dumps(figures_of(control)), flush=True)

    asyncio.run(run())


def figures_of(control: Any) -> dict[str, Any]:
    loop = control.loop
    ms = np.array(loop.latencies_s or [0.0]) * 1e3
    return {
        "event_to_command_ms": {
            "count": len(loop.latencies_s),
            "p50": float(np.percentile(ms, 50)),
            "p99": float(np.percentile(ms, 99)),
            "max": float(ms.max()),
        },
        "active_jobs": len(loop.jobs),
        "used_gpus": loop.devices.used,
        "workers": sum(len(job.workers) for job in loop.jobs.values()),
        "live_workers_connected": sum(
            view.connected
            for handle in loop.elastic.service.jobs.values()
            for view in handle.state.workers.values()
        ),
        "failed_jobs": control.store.count_jobs().get("failed", 0),
        "resident_mb": psutil.Process().memory_info().rss / 1e6,
    }


class Child:
    """A server process of the crowd."""

    def __init__(self, home: Path, options: argparse.Namespace, new_agents: int) -> None:
        """It makes a token for each of the new agents."""
        command = [sys.executable, __file__, "--serve", str(home), "--agents", str(new_agents)]
        began_s = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--policy", options.policy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.at = self._line()
        self.start_s = time.perf_counter() - began_s
        headers = {"Authorization": f"Bearer {self.at['token']}"}
        self.http = httpx.Client(base_url=f"{self.at['address']}/api/v1", headers=headers, timeout=120)

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the server ended")
        return dict(json.loads(line))

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def figures(self) -> dict[str, Any]:
        self.tell("figures")
        return self._line()

    def ready(self) -> int:
        return sum(node["state"] == "ready" for node in self.http.get("/nodes").json()["items"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def submit(http: httpx.Client, i: int, live: int, rng: random.Random) -> None:
    if i < live:
        spec: dict[str, Any] = {"gpus": "2..10", "resize": "live", "iterations": 1e9}
    else:
        spec = {"gpus": str(rng.choice((1, 1, 1, 2, 4))), "expected_s": 100.0 + i % 977}
    reply = http.post("/jobs", json={"command": ["train"], "workdir": "/tmp", **spec})
    if reply.status_code != 201:
        raise SystemExit(f"submission {i}: {reply.status_code} {reply.text}")


def until(what: Any, words: str, limit_s: float = 120.0) -> float:
    """Wait, and return how long it took."""
    began_s = time.perf_counter()
    while not what():
        if time.perf_counter() - began_s > limit_s:
            raise SystemExit(f"not within {limit_s:g} s: {words}")
        time.sleep(0.02)
    return time.perf_counter() - began_s


def crowd(options: argparse.Namespace) -> dict[str, Any]:
    directory, rng = Path(tempfile.mkdtemp(prefix="shoal-bench-")), random.Random(0)
    server = Child(directory / "home", options, options.agents)
    agents = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "bench/_cluster_agents.py"), str(directory / "agents")),
            *(server.at["control"], str(GPUS_PER_NODE)),
        ],
        stdin=subprocess.PIPE,
        text=True,
    )
    assert agents.stdin is not None
    try:
        agents.stdin.write(" ".join(server.at["join"]) + "\n")
        agents.stdin.flush()
        join_s = until(lambda: server.ready() == options.agents, "all agents have joined")
        for i in range(options.jobs):
            submit(server.http, i, options.live, rng)
        full = GPUS_PER_NODE * options.agents * 0.95
        until(lambda: server.figures()["used_gpus"] >= full, "the cluster is full")
        churn(server, agents, options, rng)
        loaded = server.figures()
        process = psutil.Process(agents.pid)
        before = server.figures()
        server.kill()
        began_s = time.perf_counter()
        server = Child(directory / "home", options, 0)
        until(lambda: server.ready() == options.agents, "all agents are back")
        until(lambda: has_everything(server.figures(), before), "all workers are back")
        adopted_s = time.perf_counter() - began_s
        after = server.figures()
        return {
            "agents": options.agents,
            "jobs": options.jobs,
            "policy": options.policy,
            "all_joined_s": join_s,
            **loaded,
            "agents_resident_mb_each": process.memory_info().rss / 1e6 / options.agents,
            "restart": {
                "until_everything_is_adopted_s": adopted_s,
                "of_which_the_process_starts_s": server.start_s,
                "workers": after["workers"],
                "failed_jobs": after["failed_jobs"],
            },
        }
    finally:
        agents.kill()
        agents.wait()
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


def has_everything(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return all(now[key] >= before[key] for key in ("used_gpus", "live_workers_connected"))


def churn(server: Child, agents: Any, options: argparse.Namespace, rng: random.Random) -> None:
    """Jobs end, and as many are submitted, for some time."""
    server.tell("clear")
    end_s, n = time.perf_counter() + options.seconds, options.jobs
    while time.perf_counter() < end_s:
        for _ in range(5):
            agents.stdin.write("end\n")
        agents.stdin.flush()
        active = server.figures()["active_jobs"]
        for _ in range(min(options.jobs - active, 50)):
            submit(server.http, n, 0, rng)
            n += 1
        time.sleep(0.1)


# The pair


def pair() -> dict[str, Any]:
    from engines.shoal_home import SHOAL, ShoalHome

    directory = Path(tempfile.mkdtemp(prefix="sh-"))
    home = ShoalHome(directory / "home", dict(os.environ))
    agents: dict[str, psutil.Popen] = {}
    try:
        home.up("--gpus", 1)
        home.shoal("node", "drain", "-y", "local")  # jobs run on the other machines only
        for i, name in enumerate(("a", "b")):
            made = json.loads(home.shoal("node", "join-token", "create", "-o", "json").stdout)
            token, control = directory / f"{name}.token", made["address"]
            token.write_text(made["token"])
            token.chmod(0o600)
            options = ["--name", name, "--gpus", "2", "--address", f"127.0.0.{i + 2}"]
            agents[name] = psutil.Popen(
                [
                    *SHOAL,
                    "agent",
                    "--join",
                    control,
                    "--token-file",
                    str(token),
                    "--state",
                    str(directory / name),
                    *options,
                ],
                env=home.env,
                stderr=subprocess.DEVNULL,
            )
        home.ready(2)
        time.sleep(10.0)  # their warm processes import torch
        return {**idle(agents["a"]), **first_step(home), **killed_machine(home, agents, directory)}
    finally:
        home.down()
        for agent in agents.values():
            agent.kill()
            agent.wait()
        shutil.rmtree(directory, ignore_errors=True)


def idle(agent: psutil.Process) -> dict[str, float]:
    def cpu_s() -> float:
        found = agent.cpu_times()
        return float(found.user + found.system)

    before_s = cpu_s()
    time.sleep(IDLE_S)
    return {"idle_agent_cpu_percent": 100 * (cpu_s() - before_s) / IDLE_S}


def first_step(home: Any) -> dict[str, float]:
    began_s = time.perf_counter()
    home.train("first", "1..1", step_s=0.01)
    submitted_s = time.perf_counter() - began_s
    until(lambda: (home.job("first").step or 0) >= 1, "the first step")
    found = {"run_to_first_step_s": time.perf_counter() - began_s, "of_which_the_command_s": submitted_s}
    home.shoal("cancel", "-y", "first")
    return found


def killed_machine(home: Any, agents: dict[str, Any], directory: Path) -> dict[str, float]:
    home.train("survivor", "1..4", step_s=0.1)
    home.size("survivor", 4)
    home.trains_on("survivor")
    doomed = [p for p in psutil.process_iter() if _belongs(p, directory / "b")]
    began_s = time.perf_counter()
    for process in [agents["b"], *doomed]:
        _kill(process)
    # At most the step under way may still end with the killed workers. Steps after it are those of the others. The GPUs
    # of the killed machine are counted until its lease has ended.
    step = home.job("survivor").step or 0
    until(lambda: (home.job("survivor").step or 0) > step + 2, "it trains again")
    return {"killed_machine_to_training_s": time.perf_counter() - began_s}


def _belongs(process: psutil.Process, state: Path) -> bool:
    """Whether it is a keeper or a worker of the agent with this state directory."""
    try:
        return (
            any(str(state) in word for word in process.cmdline())
            or process.environ().get("SHOAL_HOST") == "127.0.0.3"
        )
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


TARGETS = {
    "event_to_command_p99_ms": (("crowd", "event_to_command_ms", "p99"), 100.0),
    "everything_adopted_s": (("crowd", "restart", "until_everything_is_adopted_s"), 5.0),
    "killed_machine_to_training_s": (("pair", "killed_machine_to_training_s"), 5.0),
    "idle_agent_cpu_percent": (("pair", "idle_agent_cpu_percent"), 1.0),
}
"""Name -> where it is among the figures, and the most that it may be."""


def compared(figures: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (path, most) in TARGETS.items():
        value: Any = figures
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = {"measured": value, "at_most": most, "reached": value <= most}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--live", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--policy", default="max-min")
    parser.add_argument("--only", choices=("crowd", "pair"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    figures: dict[str, Any] = {}
    if options.only != "pair":
        figures["crowd"] = crowd(options)
    if options.only != "crowd":
        figures["pair"] = pair()
    print_figures({**figures, "targets": compared(figures), "load_average": os.getloadavg()[1]})


if __name__ == "__main__":
    main()
