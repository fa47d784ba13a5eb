"""Does anything get lost when everything is killed? Random kills and stops under load, with checks all the time.

Several users submit live jobs and commands, scale, pause, resume and cancel them, while servers, agents, workers,
keepers and warm parents are killed and stopped at random. Checked all the time: what was acknowledged is on record, no
GPU is used by two processes, no process outlives its job, the events have no gap, every job is in a state that fits
what its owner asked for and what its workers do. Checked at the end: every job ended as it should, the weights of every
live job show that each sample was used once per epoch, and no process is left.

    python bench/chaos.py [--kills 1000] [--seed 1] [--minutes 40] [--gpus 6] [--policy max-min]

It prints one JSON document. The exit code is 1 if a check failed. The same seed makes the same choices; what they meet
depends on the machine's timing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _chaos_world import Agent, Process, Server, User, gaps, used_twice
from _figures import print_figures
from shoal.executors.unknown_workers import kept_workers

COUNT = Path(__file__).with_name("_count_samples.py")
FINAL = frozenset({"succeeded", "failed", "cancelled"})
SAMPLES, BATCH = 48, 6
MAX_ACTIVE = 10
#: How often each thing is killed or stopped, relative to the others.
FAULTS = {
    "kill worker": 40, "stop worker": 10, "kill keeper": 15, "stop keeper": 5, "kill server": 12,
    "stop server": 5, "kill warm parent": 8, "stop warm parent": 5, "kill agent": 3, "stop agent": 2,
}  # fmt: skip
DEEDS = {"submit": 50, "scale": 15, "pause": 8, "resume": 16, "cancel": 2, "look": 20}
SUBMIT_S = 300.0
"""How long a user repeats a submission that is not answered."""
ORPHAN_S = 60.0
"""How long a process may outlive its job: its agent may be stopped, and the machine is busy."""


@dataclass
class Submitted:
    """A job whose submission was acknowledged, and what its owner knows of it."""

    id: int
    key: int  # which submission it was
    user: User
    ends: set[str]
    epochs: int = 0  # of a live job
    result: Path | None = None
    may_be: set[str] = field(default_factory=set)  # the states that it may be in now; empty: any
    over_s: float | None = None  # when it was first seen to be over
    pending_steps: list[int] = field(default_factory=list)  # those that were seen since it is pending

    @property
    def over(self) -> bool:
        return self.over_s is not None


class Chaos:
    def __init__(self, base: Path, options: argparse.Namespace) -> None:
        self.base, self.rng = base, random.Random(options.seed)
        self.wish = random.Random(options.seed + 1)  # of the users, who have a thread of their own
        self.done = threading.Event()
        self.server = Server(base, options.gpus, options.policy)
        self.most_gpus, self.most_epochs = options.gpus // 2, options.most_epochs
        self.jobs: dict[int, Submitted] = {}
        self.faults: Counter[str] = Counter()
        self.deeds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.exact = 0
        self.workers_on_agent: set[str] = set()
        self.gpu_looks = self.last_event = self.key = 0
        self._next_orphans_s = 0.0
        #: When to continue a process that was stopped.
        self.stopped: dict[int, float] = {}
        address = self.server.wait()
        admin = User("admin", (self.server.home / "admin.token").read_text().strip())
        self.users = [admin]
        for name in ("ada", "bob", "eve"):
            made = admin.call(address, "POST", "/users", json={"name": name, **own_account()})
            assert made is not None, made
            assert made.status_code == 201, made.text
            token = admin.call(address, "POST", "/tokens", json={"user": name})
            assert token is not None
            self.users.append(User(name, token.json()["token"]))
        join = admin.call(address, "POST", "/join-tokens", json={})
        assert join is not None
        assert join.status_code == 201, join.text
        self.agent = Agent(base, join.json()["address"], join.json()["token"], 2)

    # What people do

    def deed(self) -> None:
        address = self.server.address()
        if address is None or self.server.pid in self.stopped:
            return
        what = self.wish.choices(list(DEEDS), list(DEEDS.values()))[0]
        live = [job for job in self.jobs.values() if not job.over]
        if what == "submit":
            if len(live) < MAX_ACTIVE:
                self._submit(address)
        elif live:
            job = self.wish.choice(live)
            self.look(address, job) if what == "look" else self._change(address, job, what)

    def _submit(self, address: str) -> None:
        self.key += 1
        user, kind = (
            self.wish.choice(self.users[1:]),
            self.wish.choice(["live", "live", "live", "command", "fails"]),
        )
        workdir = self.server.workdir(self.key)
        body: dict[str, Any] = {"workdir": str(workdir), "grace_s": 2, "max_restarts": 1000}
        result, epochs, ends = None, 0, {"succeeded"}
        if kind == "live":
            epochs, result = self.wish.randint(4, self.most_epochs), self.base / f"result.{self.key}.json"
            words = [str(n) for n in (SAMPLES, BATCH, epochs, self.wish.choice([0.02, 0.1, 0.2]))]
            body |= {"command": [sys.executable, str(COUNT), *words, str(result)]}
            body["gpus"] = f"1..{self.wish.randint(2, self.most_gpus)}"
        elif kind == "command":
            body |= {
                "command": ["sleep", f"{self.wish.uniform(0.1, 5):.2f}"],
                "gpus": str(self.wish.randint(1, 2)),
            }
            body["resize"] = self.wish.choice(["never", "restart"])
        else:
            body |= {"command": ["sh", "-c", "sleep 1; exit 7"], "gpus": "1", "max_restarts": 0}
            ends = {"failed"}
        headers = {"Idempotency-Key": f"chaos-{self.key}"}
        reply = None
        deadline = time.monotonic() + SUBMIT_S
        while reply is None and time.monotonic() < deadline:
            # The same key again: a submission whose answer was lost is not made twice.
            address = self.server.address() or address
            reply = user.call(address, "POST", "/jobs", json=body, headers=headers)
            if reply is None:
                time.sleep(0.2)
        if reply is None or reply.status_code not in (200, 201):
            self.wrong.append(f"a submission failed: {reply.text if reply is not None else 'no answer'}")
            return
        self.deeds["submit"] += 1
        job = reply.json()["id"]
        if job in self.jobs:
            self.wrong.append(f"job {job} was given to two submissions")
        self.jobs[job] = Submitted(job, self.key, user, ends, epochs, result)

    def _change(self, address: str, job: Submitted, what: str) -> None:
        options: dict[str, Any] = {}
        if what == "scale":
            options["json"] = {"max": self.wish.randint(1, self.most_gpus), "min": 1}
        reply = job.user.call(address, "POST", f"/jobs/{job.id}/{what}", **options)
        if what == "cancel":  # also if nobody knows whether it was heard
            job.ends = job.ends | {"cancelled"}
        if reply is None:
            job.may_be = set()
        elif reply.status_code < 300:
            self.deeds[what] += 1
            # A job may end while it is being paused; one that was cancelled as it ended has ended.
            job.may_be = {"pause": {"paused", *FINAL}, "cancel": {"stopping", *FINAL}}.get(what, job.may_be)
            if what == "resume":
                job.may_be = set()
            if what == "cancel":
                job.ends = {"cancelled", "succeeded"} if job.epochs else job.ends
        elif reply.status_code not in (409, 422):
            self.wrong.append(f"{what} of job {job.id} answered {reply.status_code}: {reply.text}")

    def look(self, address: str, job: Submitted) -> str | None:
        reply = job.user.call(address, "GET", f"/jobs/{job.id}")
        if reply is None:
            return None
        if reply.status_code != 200:
            self.wrong.append(f"job {job.id} was acknowledged and is lost: {reply.status_code}")
            return None
        state = str(reply.json()["state"])
        if job.may_be and state not in job.may_be:
            self.wrong.append(f"job {job.id} is {state} and not one of {sorted(job.may_be)}")
        step = int(reply.json()["step"] or 0)
        if state != "pending":
            job.pending_steps = []
        elif step not in job.pending_steps[-1:]:
            job.pending_steps.append(step)
            # One step more is the last word of a worker that has ended since.
            if len(job.pending_steps) > 2 and job.pending_steps == sorted(job.pending_steps):
                self.wrong.append(f"job {job.id} is pending and trains: steps {job.pending_steps}")
        if state in FINAL:
            if state not in job.ends:
                self.wrong.append(
                    f"job {job.id} {state} and not one of {sorted(job.ends)}: {reply.json()['message']}"
                )
            job.over_s = time.monotonic()
            self._check_weights(job, state)
        return state

    def _check_weights(self, job: Submitted, state: str) -> None:
        if job.result is None or state != "succeeded":
            return
        counts = json.loads(job.result.read_text()) if job.result.exists() else None
        if counts == [float(job.epochs)]:
            self.exact += 1
        else:
            self.wrong.append(f"job {job.id} used its samples {counts} times in {job.epochs} epochs")

    # What fails

    def fault(self) -> None:
        what = self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        number = signal.SIGKILL if what.startswith("kill") else signal.SIGSTOP
        if what == "kill server":
            if self.server.address() is None and self.rng.random() < 0.8:
                return  # rarely while it starts: otherwise it would never get far
            self.server.kill()
            self.stopped.pop(self.server.pid, None)
            self.server.begin()
        elif what == "kill agent":
            self.agent.kill()
            self.stopped.pop(self.agent.process.pid, None)
            self.agent.begin()
        else:
            target = self._target(what.partition(" ")[2])
            if target is None:
                return
            try:
                os.kill(target, number)
            except ProcessLookupError:
                return
            if number == signal.SIGSTOP:
                self.stopped[target] = time.monotonic() + self.rng.uniform(0.5, 8.0)
        self.faults[what] += 1

    def _target(self, what: str) -> int | None:
        if what == "server":
            return self.server.pid if self.server.address() is not None else None
        if what == "agent":
            return self.agent.process.pid
        if what == "warm parent":
            return self.server.zygote()
        workers: list[Process] = self.server.workers()
        if not workers:
            return None
        chosen = self.rng.choice(sorted(workers, key=lambda w: w.worker))
        return chosen.pid if what == "worker" else chosen.keeper

    def tend(self) -> None:
        """Continue what was stopped long enough, and start a server that ended by itself (which is wrong)."""
        for pid, until_s in list(self.stopped.items()):
            if time.monotonic() >= until_s:
                del self.stopped[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        process = self.server.process
        if process is not None and process.poll() is not None:
            self.wrong.append(f"the server ended by itself with {process.returncode}")
            self.server.begin()

    # What must hold

    def check(self) -> None:
        found = used_twice(self.server)
        if (
            found and used_twice(self.server) == found
        ):  # not between the end of a process and its keeper's file
            self.wrong += found
        self.gpu_looks += 1
        self.last_event, missing = gaps(self.server, self.last_event)
        if missing:
            self.wrong.append(f"events {missing[:5]} are missing")
        self._check_orphans()

    def _check_orphans(self) -> None:
        """No process outlives its job by more than the time in which a stopped keeper or server goes on."""
        self.workers_on_agent |= {process.worker for process in self.server.workers() if process.on_agent}
        if time.monotonic() < self._next_orphans_s:
            return
        self._next_orphans_s = time.monotonic() + 2.0
        over = {job.key: job for job in list(self.jobs.values()) if job.over}
        for key, pids in self.server.processes_of_jobs().items():
            job = over.get(key)
            if job is not None and time.monotonic() - (job.over_s or 0.0) > ORPHAN_S:
                self.wrong.append(f"processes {pids} outlive job {job.id}")

    def run(self, kills: int, limit_s: float, per_s: float) -> None:
        """`per_s`: faults per second."""
        deadline, next_fault, next_line = time.monotonic() + limit_s, 0.0, 0.0
        users = threading.Thread(target=self._use)
        users.start()
        while sum(self.faults.values()) < kills and time.monotonic() < deadline:
            self.tend()
            if time.monotonic() >= next_fault and self.jobs:
                self.fault()
                next_fault = time.monotonic() + self.rng.expovariate(per_s)
            self.check()
            if time.monotonic() >= next_line:
                self.tell(f"{sum(self.faults.values())} of {kills} kills and stops")
                next_line = time.monotonic() + 60
            time.sleep(0.02)
        self.tell("no more of them: all jobs are to end")
        self.done.set()
        while users.is_alive():
            self.tend()
            users.join(0.1)

    def tell(self, what: str) -> None:
        over = sum(job.over for job in self.jobs.values())
        now = f"{what}; {over} of {len(self.jobs)} jobs are over; {len(self.wrong)} things are wrong"
        print(f"{time.strftime('%H:%M:%S')} {now}", file=sys.stderr, flush=True)

    def _use(self) -> None:
        try:
            while not self.done.is_set():
                self.deed()
                time.sleep(0.02)
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def end(self, limit_s: float) -> None:
        """Let all jobs end, stop the server, and look at what is left."""
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        address, deadline = self.server.wait(), time.monotonic() + limit_s
        while time.monotonic() < deadline and any(not job.over for job in self.jobs.values()):
            for job in [job for job in self.jobs.values() if not job.over]:
                if self.look(address, job) == "paused":
                    self._change(address, job, "resume")
            self.check()
            time.sleep(0.2)
        self.wrong += [f"job {job.id} did not end" for job in self.jobs.values() if not job.over]
        self.users[0].call(address, "POST", "/shutdown", json={"jobs": "stop"})
        assert self.server.process is not None
        self.server.process.wait(60)
        self.agent.process.terminate()
        self.agent.process.wait(60)
        kept = kept_workers(self.server.home / "jobs") | kept_workers(self.base / "agent")
        kept.pop(self.base / "agent", None)
        left = [*kept.values(), *(pid for pids in self.server.processes_of_jobs().values() for pid in pids)]
        if left:
            self.wrong.append(f"processes {left} are left")
        if not self.workers_on_agent:
            self.wrong.append("the agent ran no worker")


def own_account() -> dict[str, Any]:
    """The account for the jobs of all users: that of this process, which is no question of safety here."""
    if os.geteuid() == 0:
        return {"account": pwd.getpwuid(0).pw_name}
    return {"same_account": True}


def main() -> int:
    options = _options()
    base = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    os.environ["SHOAL_JOBS_DIR"] = str(base / "accounts")
    chaos = Chaos(base, options)
    began = time.monotonic()
    try:
        chaos.run(options.kills, options.minutes * 60, options.per_s)
        lasted_s = time.monotonic() - began
        chaos.end(60 + options.minutes * 60)
    finally:
        if chaos.server.process is not None and chaos.server.process.poll() is None:
            chaos.server.kill()
        if chaos.agent.process.poll() is None:
            chaos.agent.kill()
    live = [job for job in chaos.jobs.values() if job.epochs]
    print_figures(
        {
            "seed": options.seed, "seconds": round(lasted_s), "faults": sum(chaos.faults.values()),
            "faults_by_kind": dict(sorted(chaos.faults.items())), "jobs": len(chaos.jobs), "live_jobs": len(live),
            "live_jobs_exact_by_their_weights": chaos.exact,
            "workers_on_the_agent": len(chaos.workers_on_agent), "requests": dict(sorted(chaos.deeds.items())),
            "looks_at_gpus": chaos.gpu_looks, "events": chaos.last_event,
            "wrong": list(dict.fromkeys(chaos.wrong))[:50],
        }
    )  # fmt: skip
    if chaos.wrong:
        print(f"see {base}", file=sys.stderr)
        return 1
    shutil.rmtree(base)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="kills and stops")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="limit of the run, and of the end of all jobs"
    )
    parser.add_argument("--per-s", type=float, default=1.0, help="kills and stops per second")
    parser.add_argument("--gpus", type=int, default=6)
    parser.add_argument("--most-epochs", type=int, default=20, help="the longest live jobs")
    parser.add_argument("--policy", default="max-min")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
