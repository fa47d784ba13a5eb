"""What a change of workers costs: Shoal's runtime beside torchrun's elastic restart, in one run on one machine.

    python bench/elastic.py [--trials 10] [--torchrun-trials 3] [--models 1M 25M]

Prints one JSON document on stdout, and on stderr how far it is. A *pause* is the longest time between two steps of a
survivor around the change, less the median step before or after it, whichever is longer (three workers on two cores
step slower than two). *Idle* is the part of it in which the runtime kept the survivor from working, as it measured
itself. *Jitter* is what the same window of time shows just before the change, when nothing changes: its longest step
less the median one. A pause below it is not told from chance. torchrun gets its best settings:
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it growing by a node fails in torch 2.13), the shortest last call and
monitor interval; it trains with DDP and a checkpoint every 20 steps. The larger model is also measured sharded: in
groups of two workers, two and four of them, beside the replicated one at the same sizes, and as one set beside
torchrun with plain FSDP2 and its distributed checkpoints.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from shoal.executors.standalone import LocalJob  # noqa: E402
from shoal.executors.zygote import Zygote  # noqa: E402
from shoal.wire import events as ev  # noqa: E402

PAPER = {
    "source": "Or, Zhang, Freedman: Resource Elasticity in Distributed Deep Learning, MLSys 2020: average idle time",
    "cifar10": {"grow_s": 3.179, "shrink_s": 2.612, "checkpoint_restart_s": 72.756},
    "imagenet": {"grow_s": 6.813, "shrink_s": 4.376, "checkpoint_restart_s": 81.186},
}


SHARDED = "25M"


def new_directory() -> Path:
    """For the logs and checkpoints of one run; gone when this process ends."""
    path = tempfile.mkdtemp(prefix="bench-elastic-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Steps:
    """The step logs of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self) -> dict[str, list[tuple[float, int, int]]]:
        logs = {}
        for path in self.directory.glob("*.*"):
            if path.suffix[1:].isdigit():
                rows = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
                logs[path.name] = [(float(t), int(s), int(n)) for t, s, n in rows]
        return logs

    def since(self, t: float) -> int:
        return max((sum(row[0] > t for row in rows) for rows in self.read().values()), default=0)

    def wait(
        self, true: Callable[[dict[str, list[tuple[float, int, int]]]], bool], timeout_s: float = 180.0
    ) -> None:
        deadline_s = now_s() + timeout_s
        while not true(self.read()):
            if now_s() > deadline_s:
                raise TimeoutError("the run does not get on")
            time.sleep(0.05)


def intervals(times: list[float]) -> list[tuple[float, float]]:
    return [(b, b - a) for a, b in pairwise(times)]


def pause_of(times: list[float], begin_s: float, end_s: float) -> dict[str, float] | None:
    """The pause of one process in [begin, end], and the median step around it."""
    before = [d for t, d in intervals(times) if begin_s - 20 < t <= begin_s][-12:]
    after = [d for t, d in intervals(times) if t > end_s][:12]
    during = [d for t, d in intervals(times) if begin_s < t <= end_s]
    if len(before) < 3 or len(after) < 3 or not during:
        return None
    usual = max(statistics.median(before), statistics.median(after))
    return {
        "pause_s": max(0.0, max(during) - usual),
        "step_s": statistics.median(before),
        "gap_s": max(during),
    }


def jitter_of(times: list[float], begin_s: float, end_s: float, quiet_s: float) -> dict[str, float]:
    """The longest step, less the median one, in a window of the same length before [begin, end].

    Nothing changed since `quiet_s`. Empty if that is too short.
    """
    first_s = begin_s - (end_s - begin_s)
    quiet = [d for t, d in intervals(times) if quiet_s < t - d and t <= begin_s]
    window = [d for t, d in intervals(times) if first_s < t <= begin_s]
    if first_s < quiet_s or len(quiet) < 3 or not window:
        return {}
    return {"jitter_s": max(0.0, max(window) - statistics.median(quiet))}


def summary(trials: list[dict[str, float]]) -> dict[str, Any]:
    if not trials:
        return {"trials": 0}
    pauses = [t["pause_s"] for t in trials]
    result: dict[str, Any] = {
        "trials": len(trials),
        "pause_median_ms": round(statistics.median(pauses) * 1e3, 2),
        "pause_worst_ms": round(max(pauses) * 1e3, 2),
        "gap_median_ms": round(statistics.median(t["gap_s"] for t in trials) * 1e3, 2),
        "median_step_ms": round(statistics.median(t["step_s"] for t in trials) * 1e3, 2),
        "pauses_ms": [round(pause * 1e3, 2) for pause in pauses],
    }
    if jitters := [t["jitter_s"] for t in trials if "jitter_s" in t]:
        result["jitter_ms"] = round(statistics.median(jitters) * 1e3, 2)
        result["jitters_ms"] = [round(jitter * 1e3, 2) for jitter in jitters]
    if any("idle_s" in t for t in trials):
        idle = [t["idle_s"] for t in trials if "idle_s" in t]
        result["idle_median_ms"] = round(statistics.median(idle) * 1e3, 2)
        result["idle_worst_ms"] = round(max(idle) * 1e3, 2)
    result["pause_in_steps"] = round(result["pause_median_ms"] / result["median_step_ms"], 3)
    if "again_s" in trials[0]:
        result["again_median_s"] = round(statistics.median(t["again_s"] for t in trials), 3)
        result["again_worst_s"] = round(max(t["again_s"] for t in trials), 3)
    return result


# Shoal


class ShoalRun:
    def __init__(self, size: str, zygote: Zygote, shard: str = "") -> None:
        self.directory = new_directory()
        self.steps = Steps(self.directory)
        self.job = LocalJob(
            [str(HERE / "elastic_shoal.py")],
            2,
            directory=self.directory,
            env={"MODEL": size, "STEP_LOG": str(self.directory), "SHARD": shard},
            zygote=zygote,
            keep_size=False,
        )
        self._longest_s = 0.0  # of the changes so far
        self._quiet_s = 0.0  # when the change before the present one was over

    def change(self, act: Callable[[], None], members: int) -> tuple[float, float]:
        """Do it, wait until it is done and a few steps more; when it began and ended.

        Before it, wait for as long as the longest change has taken: to see how steps differ when nothing changes.
        """
        self.settle()
        self.steps.wait(lambda logs: now_s() - self._quiet_s > 1.2 * self._longest_s)
        since = len(self.job.events)
        began_s = now_s()
        act()
        self.job.wait_size(members, 120, since)
        end_s = now_s()
        self.steps.wait(lambda logs: self.steps.since(end_s) >= 6)
        return began_s, end_s

    def settle(self) -> None:
        """Wait for a few steps after the last change."""
        changes = [t for t, e in self.job.events if isinstance(e, ev.GenerationCommitted)]
        self._quiet_s = changes[-1]
        self.steps.wait(lambda logs: self.steps.since(self._quiet_s) >= 5)

    def members(self) -> tuple[str, ...]:
        return self.job.handle.state.active.members  # type: ignore[union-attr]

    def pauses(self, workers: set[str], began_s: float, end_s: float) -> list[dict[str, float]]:
        logs = {name.rpartition(".")[0]: [r[0] for r in rows] for name, rows in self.steps.read().items()}
        first_after = min((t for w in workers for t in logs.get(w, []) if t > end_s), default=end_s)
        self._longest_s = max(self._longest_s, first_after - began_s)
        found = [(w, pause_of(logs[w], began_s, first_after)) for w in workers if w in logs]
        number = self.job.handle.state.active.number  # type: ignore[union-attr]
        quiet = {w: jitter_of(logs[w], began_s, first_after, self._quiet_s) for w, _ in found}
        return [{**f, **quiet[w], **self.idle(w, number)} for w, f in found if f]

    def idle(self, worker: str, generation: int) -> dict[str, float]:
        """What the runtime itself measured: work at the boundary and waiting for the end of the transfer."""

        def told(event: ev.JobEvent) -> bool:
            return isinstance(event, ev.PauseMeasured) and (event.worker, event.generation) == (
                worker,
                generation,
            )

        with contextlib.suppress(TimeoutError):
            event = self.job.wait(told, 3)
            return {"idle_s": event.pause_s}  # type: ignore[union-attr]
        return {}


def worst(found: list[dict[str, float]]) -> dict[str, float] | None:
    """The longest pause of all survivors, and their largest jitter."""
    if not found:
        return None
    jitters = [f["jitter_s"] for f in found if "jitter_s" in f]
    return {**max(found, key=lambda f: f["pause_s"]), **({"jitter_s": max(jitters)} if jitters else {})}


def bench_shoal(size: str, trials: int, zygote: Zygote) -> dict[str, Any]:
    results: dict[str, list[dict[str, float]]] = {k: [] for k in ("grow", "shrink", "migrate", "lose")}
    joins: list[float] = []
    run = ShoalRun(size, zygote)
    with run.job as job:
        job.wait_size(2, 120)
        for trial in range(trials):
            tell(f"{size} with shoal: trial {trial + 1} of {trials}")
            stay = set(run.members())
            began_s, end_s = run.change(lambda: job.resize(3), 3)
            joins += join_time(run, stay, began_s)
            keep(results["grow"], worst(run.pauses(stay, began_s, end_s)))
            stay = set(run.members()[:2])
            keep(results["shrink"], worst(run.pauses(stay, *run.change(lambda: job.resize(2), 2))))
            keep(results["migrate"], migrate(run))
            keep(results["lose"], lose(run))
            run.change(lambda: job.resize(2), 2)
    return {
        **{k: summary(v) for k, v in results.items()},
        "join_warm_median_s": round(statistics.median(joins), 3),
        "join_warm_worst_s": round(max(joins), 3),
    }


def keep(found: list[dict[str, float]], trial: dict[str, float] | None) -> None:
    if trial is not None:
        found.append(trial)


def join_time(run: ShoalRun, before: set[str], began_s: float) -> list[float]:
    """From the command to the end of the newcomer's first step in which it had a part of the batch."""
    logs = run.steps.read()
    return [rows[0][0] - began_s for name, rows in logs.items() if name.rpartition(".")[0] not in before
            and rows and rows[0][0] > began_s][:1]  # fmt: skip


def migrate(run: ShoalRun) -> dict[str, float] | None:
    """All workers change, so the job's steps are looked at, whoever does them."""
    run.settle()
    old = set(run.members())
    began_s = now_s()
    since = len(run.job.events)
    run.job.migrate()
    run.job.wait(lambda e: isinstance(e, ev.GenerationCommitted) and not old & set(e.members), 120, since)
    end_s = now_s()
    run.steps.wait(lambda logs: run.steps.since(end_s) >= 6)
    first: dict[int, float] = {}
    for rows in run.steps.read().values():
        for t, step, _ in rows:
            first[step] = min(t, first.get(step, t))
    times = sorted(first.values())
    return pause_of(times, began_s, min(t for t in times if t > end_s))


def lose(run: ShoalRun) -> dict[str, float] | None:
    run.settle()
    victim, survivor = run.members()
    since = len(run.job.events)
    killed_s = now_s()
    run.job.kill(victim)
    run.job.wait_size(1, 120, since)
    end_s = now_s()
    run.steps.wait(lambda logs: run.steps.since(end_s) >= 6)
    found = worst(run.pauses({survivor}, killed_s, end_s))
    rows = next(r for n, r in run.steps.read().items() if n.rpartition(".")[0] == survivor)
    again_s = next(t for t, _, n in rows if t > killed_s and n == 1) - killed_s
    return {**found, "again_s": again_s} if found else None


def bench_throughput(size: str, steps: int, zygote: Zygote, shard: str = "") -> dict[str, Any]:
    directory = new_directory()
    env = {"MODEL": size, "STEP_LOG": str(directory), "STEPS": str(steps), "SHARD": shard}
    script = str(HERE / ("elastic_fsdp.py" if shard else "elastic_throughput.py"))
    with LocalJob([script], 2, directory=directory, env=env, zygote=zygote, keep_size=False) as job:
        end = job.wait_end(600)  # the script leaves its loop early
        if not (directory / "result.json").exists():
            raise RuntimeError(f"{end}: {job.logs()}")
    return json.loads((directory / "result.json").read_text())


# torchrun


class TorchrunRun:
    def __init__(self, size: str, port: int, shard: str = "") -> None:
        self.directory = new_directory()
        self.steps = Steps(self.directory)
        self.agents: list[subprocess.Popen[bytes]] = []
        self._port = port
        self._env = {
            **os.environ,
            "MODEL": size,
            "STEP_LOG": str(self.directory),
            "SHARD": shard,
            "CHECKPOINT": str(self.directory / "state.pt"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def add(self) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=bench",
            "--rdzv-conf=last_call_timeout=1,join_timeout=60", "--max-restarts=100", "--monitor-interval=0.1",
            str(HERE / "elastic_torchrun.py"),
        ]  # fmt: skip
        log = open(self.directory / f"agent{len(self.agents)}.log", "ab")  # noqa: SIM115
        self.agents.append(
            subprocess.Popen(command, env=self._env, stdout=log, stderr=log, start_new_session=True)
        )

    def until(self, workers: int, after_s: float, count: int = 6) -> None:
        self.steps.wait(
            lambda logs: any(
                sum(t > after_s and n == workers for t, _, n in r) >= count for r in logs.values()
            ),
            150,
        )

    def gap(self, began_s: float, workers: int) -> dict[str, float] | None:
        """Between the last step of the old set and the first of the new, wherever they were."""
        rows = sorted(row for log in self.steps.read().values() for row in log)
        first: dict[int, float] = {}
        times = []
        for t, step, n in rows:  # steps that are done again after a restart count as new ones
            if step not in first or t - first[step] > 1.0:
                first[step] = t
                times.append((t, n))
        end_s = next(t for t, n in times if t > began_s + 0.05 and n == workers)
        found = pause_of([t for t, _ in times], began_s, end_s)
        return {**found, "again_s": end_s - began_s} if found else None

    def worker_of(self, agent: int) -> int:
        return children(self.agents[agent].pid)[-1]

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                # Its workers lead sessions of their own and would live on.
                for pid in (*children(agent.pid), agent.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                agent.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def bench_torchrun(size: str, trials: int, shard: str = "") -> dict[str, Any]:
    results: dict[str, list[dict[str, float]]] = {k: [] for k in ("grow", "shrink", "lose")}
    failures: list[str] = []
    for trial in range(trials):
        tell(f"{size} with torchrun{' and FSDP2' if shard else ''}: trial {trial + 1} of {trials}")
        run = TorchrunRun(size, 29500 + os.getpid() % 1000 + trial + (50 if shard else 0), shard)
        try:
            run.add()
            run.add()
            run.until(2, 0.0, 12)
            for kind, act, workers in (
                ("grow", run.add, 3),
                ("lose", lambda run=run: os.kill(run.worker_of(1), signal.SIGKILL), 3),
                ("shrink", lambda run=run: run.agents[2].terminate(), 2),
            ):
                began_s = now_s()
                act()
                if kind == "lose":
                    time.sleep(0.3)  # the other worker may complete a step that was under way
                    began_s += 0.3
                run.until(workers, began_s)
                keep(results[kind], run.gap(began_s, workers))
        except (TimeoutError, StopIteration, OSError) as error:
            failures.append(f"trial {trial}: {error!r}")
        finally:
            run.close()
    return {**{k: summary(v) for k, v in results.items()}, "failures": failures}


# Sharded models (FSDP2)


def bench_sizes(size: str, trials: int, zygote: Zygote, shard: str, larger: int) -> dict[str, Any]:
    """From two workers to `larger` and back. `shard`: `groups`, `set`, or empty for a replicated model."""
    results: dict[str, list[dict[str, float]]] = {"grow": [], "shrink": []}
    run = ShoalRun(size, zygote, shard)
    with run.job as job:
        job.wait_size(2, 120)
        for trial in range(trials):
            tell(f"{size} with shoal, {shard or 'replicated'}, 2 to {larger}: trial {trial + 1} of {trials}")
            stay = set(run.members())
            keep(results["grow"], worst(run.pauses(stay, *run.change(lambda: job.resize(larger), larger))))
            stay = set(run.members()[:2])
            keep(results["shrink"], worst(run.pauses(stay, *run.change(lambda: job.resize(2), 2))))
    return {kind: summary(found) for kind, found in results.items()}


def sharded_figures(
    size: str, trials: int, torchrun_trials: int, steps: int, replicated: dict[str, Any], zygote: Zygote
) -> dict[str, Any]:
    """Both ways of sharding, beside the replicated model of the same run, torchrun and plain FSDP2.

    A group has two workers. So it is compared with a replicated model that grows and shrinks by two, too: the same
    number of processes shares the cores.
    """
    found: dict[str, Any] = {
        "replicated_2_to_4": bench_sizes(size, trials, zygote, "", 4),
        "groups": bench_sizes(size, trials, zygote, "groups", 4),
        "set": bench_sizes(size, trials, zygote, "set", 3),
    }
    found["torchrun"] = bench_torchrun(size, torchrun_trials, "set") if torchrun_trials else {}
    for shard in ("groups", "set"):
        tell(f"{size} sharded ({shard}) beside FSDP2")
        found[f"{shard}_throughput"] = bench_throughput(size, steps, zygote, shard)

    def ratios(of: dict[str, Any], to: dict[str, Any], what: str) -> dict[str, float | None]:
        """A pause that cannot be measured counts as a millisecond."""
        pairs = {k: [side.get(k, {}).get(what) for side in (of, to)] for k in ("grow", "shrink")}
        return {k: None if None in (a, b) else round(a / max(b, 1.0), 3) for k, (a, b) in pairs.items()}

    for name, other in (("2_to_4", found["replicated_2_to_4"]), ("2_to_3", replicated)):
        for what in ("pause", "idle"):
            found[f"groups_{what}_over_replicated_{name}"] = ratios(
                found["groups"], other, f"{what}_median_ms"
            )
    found["set_pause_over_torchrun"] = ratios(found["set"], found["torchrun"], "pause_median_ms")
    found["targets"] = sharded_targets(found)
    return found


def sharded_targets(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target, the figures it is about, and whether all of them reach it. None: not measured."""

    def target(limit: float, figures: dict[str, float | None], most: bool = True) -> dict[str, Any]:
        known = [figure for figure in figures.values() if figure is not None]
        complete = known and len(known) == len(figures)
        reached = all(f <= limit if most else f >= limit for f in known) if complete else None
        return {"at_most" if most else "at_least": limit, "found": figures, "reached": reached}

    kinds = ("grow", "shrink")
    set_pauses = {k: found["set"].get(k, {}).get("pause_median_ms") for k in kinds}
    throughputs = {s: found[f"{s}_throughput"].get("throughput_vs_fsdp2") for s in ("groups", "set")}
    return {
        "groups: pause over that of a replicated model": target(
            2.0, found["groups_pause_over_replicated_2_to_4"]
        ),
        "one set: pause in ms": target(2000.0, set_pauses),
        "one set: pause over torchrun's restart": target(1 / 3, found["set_pause_over_torchrun"]),
        "steps per second over those of plain FSDP2": target(0.95, throughputs, most=False),
    }


def compare(shoal: dict[str, Any], torchrun: dict[str, Any]) -> dict[str, Any]:
    """A pause that cannot be measured counts as a millisecond."""

    def ratio(kind: str, what: str, least: float) -> float | None:
        a, b = shoal[kind].get(what), torchrun.get(kind, {}).get(what)
        return round(b / max(a, least), 1) if a is not None and b is not None else None

    return {
        "grow_pause_torchrun_over_shoal": ratio("grow", "pause_median_ms", 1.0),
        "shrink_pause_torchrun_over_shoal": ratio("shrink", "pause_median_ms", 1.0),
        "lose_again_torchrun_over_shoal": ratio("lose", "again_median_s", 0.001),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--torchrun-trials", type=int, default=3, help="0: without torchrun")
    parser.add_argument("--models", nargs="+", choices=["1M", "25M"], default=["1M", "25M"])
    parser.add_argument("--steps", type=int, default=400, help="steps compared with DDP (a fifth for 25M)")
    parser.add_argument("--no-sharded", dest="sharded", action="store_false", help="without FSDP2")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began_s = now_s()
    zygote = Zygote()
    zygote.wait_ready()
    result: dict[str, Any] = {
        "machine": {
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "paper": PAPER,
        "models": {},
    }
    for size in args.models:
        tell(f"{size} beside DDP")
        entry: dict[str, Any] = {
            "throughput": bench_throughput(size, args.steps if size == "1M" else args.steps // 5, zygote)
        }
        entry["shoal"] = bench_shoal(size, args.trials, zygote)
        entry["torchrun"] = bench_torchrun(size, args.torchrun_trials) if args.torchrun_trials else {}
        entry["ratios"] = compare(entry["shoal"], entry["torchrun"])
        if size == SHARDED and args.sharded:
            entry["sharded"] = sharded_figures(
                size, args.trials, args.torchrun_trials, args.steps // 5, entry["shoal"], zygote
            )
        entry["load"] = os.getloadavg()[0]
        result["models"][size] = entry
        tell(json.dumps({size: entry}))
    zygote.close()
    result["seconds"] = round(now_s() - began_s, 1)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
