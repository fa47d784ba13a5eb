"""`make demo`: a private cluster of 4 virtual GPUs, the jobs of three users, and the same jobs under FIFO.

Everything is real but the GPUs: server, workers, gradients, resizes. A step of an elastic job takes a given
time divided by its workers, as on GPUs that scale well: this is what virtual GPUs on two cores cannot have.

    python examples/demo.py [--policy afs-p] [--plain]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.cli.jobs_table import reason, want
from shoal.cli.why import explain
from shoal.client import Client
from shoal.client_errors import ClientError
from shoal.server.models import Job, JobSpec, Why

GPUS = 4
EXAMPLES = Path(__file__).resolve().parent
ELASTIC = EXAMPLES / "elastic" / "emulated.py"
#: One run must end within this; two runs and the start fit two minutes.
RUN_LIMIT_S = 55.0
COLOURS = {"ada": "cyan", "ben": "magenta", "cho": "yellow"}
RIGID = """import sys, time
for i in range(int(sys.argv[1])):
    print("part", i, flush=True)
    time.sleep(0.5)
"""


@dataclass(frozen=True)
class Arrival:
    """A job and when it is submitted, counted from the start of the run."""

    at_s: float
    user: str
    name: str
    gpus: str
    #: Work in GPU-seconds for an elastic job; seconds at its size for a rigid command.
    work_s: float
    elastic: bool = True

    def spec(self) -> JobSpec:
        if self.elastic:
            steps = round(self.work_s / STEP_S)
            command = [sys.executable, str(ELASTIC), "--steps", str(steps), "--step-time", str(STEP_S)]
        else:
            command = [sys.executable, "-c", RIGID, str(round(self.work_s / 0.5))]
        return JobSpec(name=self.name, command=command, workdir=str(EXAMPLES), gpus=self.gpus, grace_s=2)


#: A step of an elastic job on one GPU.
STEP_S = 0.2
ARRIVALS = (
    Arrival(0, "ada", "ada-vision", "1..4", 44),
    Arrival(3, "ben", "ben-speech", "1..4", 26),
    Arrival(6, "cho", "cho-export", "2", 6, elastic=False),
    Arrival(8, "cho", "cho-ranker", "1..2", 10),
)


@dataclass
class Run:
    """What one run of the arrivals came to."""

    policy: str
    jobs: dict[str, Job] = field(default_factory=dict)
    why: Why | None = None
    took_s: float = 0.0
    gpu_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="afs-p", help="the policy to show; see shoal policy ls")
    parser.add_argument("--plain", action="store_true", help="plain lines, as without a terminal")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    plain = options.plain or not console.is_terminal
    arrivals = ARRIVALS
    if importlib.util.find_spec("torch") is None:
        console.print("torch is not installed: the elastic jobs are left out (pip install 'shoal[torch]').")
        arrivals = tuple(a for a in ARRIVALS if not a.elastic)
    if importlib.util.find_spec("shoal.server.serve") is None:
        command = [sys.executable, "-m", "shoal.cli.main", "sim", "compare", "--sample"]
        return subprocess.run(command, check=False).returncode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        runs = []
        for policy in (options.policy, "fifo"):
            console.rule(f"{len(arrivals)} jobs of three users on {GPUS} virtual GPUs, policy {policy}")
            with cluster(policy) as home:
                runs.append(play(console, home, policy, arrivals, plain=plain))
        summary(console, runs)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is gone")
        return 130
    except ClientError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def cluster(policy: str) -> Iterator[Path]:
    """A server of its own in a temporary home. A second process sees to it that nothing is left."""
    home = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    mine, theirs = os.pipe()
    janitor = subprocess.Popen(
        [sys.executable, __file__, "--clean", str(home), str(mine)], pass_fds=[mine], start_new_session=True
    )
    os.close(mine)
    try:
        command = [sys.executable, "-m", "shoal.cli.main", "up", "--home", str(home), "--gpus", str(GPUS)]
        started = subprocess.run([*command, "--policy", policy], capture_output=True, text=True, check=False)
        if started.returncode:
            raise ClientError(started.stderr.strip().removeprefix("shoal: "))
        yield home
    finally:
        os.close(
            theirs
        )  # also what happens when this process is killed: the janitor reads the end of the pipe
        janitor.wait()


def clean(home: Path, pipe: int) -> None:
    """Wait until the demo is over, however it ends; then end its server, its workers, and its directory."""
    import psutil

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(pipe, 1)
    with contextlib.suppress(ClientError), Client(home=home, timeout_s=5) as client:
        pid = client.status().pid
        client.shutdown()
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).wait(timeout=10)
    quiet = 0
    while quiet < 3:  # what dies may have started another just before
        left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _of_home(p, str(home))]
        quiet = 0 if left else quiet + 1
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        time.sleep(0.1)
    shutil.rmtree(home, ignore_errors=True)


def _of_home(process: Any, home: str) -> bool:
    """Whether a process was started for this home: its path, made at random, is in what it was given."""
    import psutil

    try:
        return any(home in text for text in [*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return False


def play(console: Console, home: Path, policy: str, arrivals: Sequence[Arrival], *, plain: bool) -> Run:
    """Submit the jobs at their times and watch until all are over."""
    run = Run(policy)
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(Client(home=home))
        users = {}
        for name in dict.fromkeys(a.user for a in arrivals):
            admin.create_user(name)
            token = admin.create_token(user=name).token
            users[name] = stack.enter_context(Client(admin.address, token, home=home))
        live = None if plain else stack.enter_context(Live(console=console, auto_refresh=False))
        started_s = time.monotonic()
        waiting = list(arrivals)
        shown: dict[str, str] = {}
        while True:
            now_s = time.monotonic() - started_s
            while waiting and waiting[0].at_s <= now_s:
                arrival = waiting.pop(0)
                users[arrival.user].submit(arrival.spec())
            run.jobs = {job.name: job for job in reversed(admin.jobs())}
            if run.why is None and not waiting:
                run.why = interesting(admin, list(run.jobs.values()))
                if run.why is not None and plain:
                    console.print("\n".join(["", f"$ shoal why {run.why.job.name}", *explain(run.why), ""]))
            if live is not None:
                live.update(picture(run, now_s), refresh=True)
            else:
                tell_changes(console, run, now_s, shown)
            if not waiting and all(job.state.is_final for job in run.jobs.values()):
                break
            if now_s > RUN_LIMIT_S:
                raise ClientError(f"the jobs are not done after {RUN_LIMIT_S:.0f} s: too much else runs here")
            time.sleep(0.2)
    run.took_s = time.monotonic() - started_s
    return run


def interesting(client: Client, jobs: Sequence[Job]) -> Why | None:
    """Why of a job that waits, or else of one that runs below what it could use."""
    for job in sorted(jobs, key=lambda job: (job.state.value != "pending", -job.id)):
        if job.reason is not None and job.state.value in ("pending", "running"):
            return client.why(job.id)
    return None


def picture(run: Run, now_s: float) -> Group:
    """The live table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for head in ("job", "state", "GPUs", "may have", "progress"):
        table.add_column(head, no_wrap=True)
    table.add_column("reason", ratio=1, no_wrap=True, overflow="ellipsis")
    for job in run.jobs.values():
        colour = COLOURS.get(job.user, "white")
        bar = Text("■" * job.gpus, style=colour) + Text("·" * (GPUS - job.gpus), style="dim")
        why = "" if job.reason is None or job.state.is_final else job.reason.sentence
        done = "" if job.progress is None else f"{job.progress:4.0%}"
        table.add_row(Text(job.name, style=colour), job.state.value, bar, want(job), done, why)
    used = sum(job.gpus for job in run.jobs.values())
    title = Text(f" {now_s:4.0f} s   policy {run.policy}   {used} of {GPUS} GPUs in use", style="bold")
    parts: list[Any] = [title, table]
    if run.why is not None:
        parts.append(Text("\n".join([f"$ shoal why {run.why.job.name}", *explain(run.why)]), style="dim"))
    return Group(*parts)


def tell_changes(console: Console, run: Run, now_s: float, shown: dict[str, str]) -> None:
    """One line for each job whose state or size has changed."""
    for job in run.jobs.values():
        line = f"{job.name:<12} {job.state.value:<10} {job.gpus} GPUs"
        if shown.get(job.name) != line:
            shown[job.name] = line
            because = f"  ({reason(job)})" if reason(job) else ""
            console.print(f"{now_s:5.1f} s  {line}{because}")


def summary(console: Console, runs: Sequence[Run]) -> None:
    """Per job where its time went, and both policies side by side."""
    for run in runs:
        table = Table(title=f"policy {run.policy}", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
        for head in ("job", "ended", "waited s", "ran s", "paused s", "resizes", "stood still s", "GPU-s"):
            table.add_column(head, justify="left" if head in ("job", "ended") else "right", no_wrap=True)
        for job in run.jobs.values():
            times = (job.waiting_s, job.running_s, job.paused_s)
            table.add_row(
                job.name,
                job.state.value,
                *(f"{t:.1f}" for t in times),
                str(job.resizes),
                f"{job.stalled_s:.2f}",
                f"{job.gpu_s:.0f}",
            )
        console.print(table)
    names = list(runs[0].jobs)
    table = Table(
        title="from submission to end, s", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left"
    )
    table.add_column("job", no_wrap=True)
    for run in runs:
        table.add_column(run.policy, justify="right", no_wrap=True)
    for name in names:
        table.add_row(name, *(f"{completion_s(run.jobs[name]):.1f}" for run in runs))
    means = [sum(completion_s(job) for job in run.jobs.values()) / len(run.jobs) for run in runs]
    table.add_row("average", *(f"{mean:.1f}" for mean in means), style="bold")
    table.add_row("all done after", *(f"{run.took_s:.1f}" for run in runs))
    console.print(table)
    console.print(
        f"{runs[0].policy} against fifo: the average job is done in {means[0] / means[1]:.2f} of the time."
    )


def completion_s(job: Job) -> float:
    return (job.finished_at - job.submitted_at).total_seconds() if job.finished_at else float("nan")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clean"]:
        clean(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
