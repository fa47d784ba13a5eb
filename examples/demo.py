"""`make demo`: the jobs of three users on a private cluster of 4 virtual GPUs, and the same jobs under FIFO.

Only the GPUs are virtual: server, workers, gradients and resizes are real. A step of an elastic job takes a given time
divided by its number of workers, as on GPUs that scale well, because virtual GPUs on a few cores cannot scale.

    python examples/demo.py [--policy afs-p] [--plain]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pwd
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

from shoal.cli.jobs_table import brief, reason, want
from shoal.cli.why import explain
from shoal.client import Client
from shoal.client.errors import TimedOut
from shoal.core.errors import ShoalError
from shoal.core.words import counted
from shoal.server.api.models import Job, JobSpec, Why

GPUS = 4
EXAMPLES = Path(__file__).resolve().parent
ELASTIC = EXAMPLES / "elastic" / "emulated.py"
#: Time limit of both runs together. A run that is not done by then is stopped, and the summary says so.
LIMIT_S = 105.0
COLOURS = {"ada": "cyan", "ben": "magenta", "cho": "yellow"}
RIGID = """import sys, time
for i in range(int(sys.argv[1])):
    print("part", i, flush=True)
    time.sleep(1)
"""


@dataclass(frozen=True)
class Arrival:
    """A job, and its submission time after the start of the run.

    An elastic job trains `amount` epochs of 6.4 GPU-seconds; a rigid command takes `amount` seconds.
    """

    at_s: float
    user: str
    name: str
    gpus: str
    amount: int
    elastic: bool = True

    def spec(self) -> JobSpec:
        if self.elastic:
            command = [sys.executable, str(ELASTIC), "--epochs", str(self.amount), "--ms-per-sample", "10"]
        else:
            command = [sys.executable, "-c", RIGID, str(self.amount)]
        return JobSpec(name=self.name, command=command, workdir=str(EXAMPLES), gpus=self.gpus, grace_s=2)


#: A long job holds the cluster when short jobs arrive: a common case, and a hard one for FIFO.
ARRIVALS = (
    Arrival(0, "ada", "ada-vision", "1..4", 8),
    Arrival(3, "ben", "ben-speech", "1..4", 2),
    Arrival(5, "cho", "cho-export", "2", 4, elastic=False),
    Arrival(7, "cho", "cho-ranker", "1..2", 1),
)


@dataclass
class Run:
    """The result of one run."""

    policy: str
    #: The last lines of output of jobs that failed.
    last_lines: dict[str, list[str]] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    why: Why | None = None
    took_s: float = 0.0
    cut_off: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="afs-p", help="the policy to show; see shoal policy ls")
    parser.add_argument("--plain", action="store_true", help="plain lines, as without a terminal")
    options = parser.parse_args()
    console = Console(highlight=False)
    plain = options.plain or not console.is_terminal
    if not console.is_terminal:
        console = Console(highlight=False, width=100, soft_wrap=True)
    arrivals = ARRIVALS
    if importlib.util.find_spec("torch") is None:
        console.print(
            "torch is not installed: the demo runs without elastic jobs (pip install 'shoal[torch]')."
        )
        arrivals = tuple(a for a in ARRIVALS if not a.elastic)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console.print(
        f"Two private clusters of {GPUS} virtual GPUs start: one for policy {options.policy}, one for fifo.\n"
        "Jobs run on the CPU of this machine. The demo removes everything when it ends. (Ctrl-C ends it at any time.)"
    )
    runs: list[Run] = []
    try:
        with private_place() as place:
            deadline_s = time.monotonic() + LIMIT_S
            # The second server starts during the first run and stays idle until its turn.
            clusters = [Cluster(place / "one", options.policy), Cluster(place / "two", "fifo")]
            for cluster in clusters:
                limit_s = (deadline_s - time.monotonic()) / (len(clusters) - len(runs))
                title = f"{len(arrivals)} jobs of three users on {GPUS} virtual GPUs, policy {cluster.policy}"
                console.print(f"\n{title}", style="bold")
                runs.append(play(console, cluster, arrivals, limit_s=limit_s, plain=plain))
            summary(console, runs)
    except KeyboardInterrupt:
        console.print("interrupted; everything that the demo started was removed")
        return 130
    except ShoalError as error:
        console.print(f"demo: {error}\neverything that the demo started was removed", markup=False)
        return 1
    return 1 if any(run.last_lines for run in runs) else 0


def warm_up(client: Client) -> None:
    """Run an empty job that loads torch: otherwise only the first run would pay for it."""
    command = [sys.executable, str(ELASTIC), "--epochs", "1", "--ms-per-sample", "0"]
    spec = JobSpec(name="warm-up", command=command, workdir=str(EXAMPLES), gpus="1..2", grace_s=2)
    with contextlib.suppress(TimedOut):
        client.wait(client.submit(spec).id, timeout_s=30)


@contextlib.contextmanager
def private_place() -> Iterator[Path]:
    """A directory for everything that the demo starts. A second process removes all of it, however the demo ends."""
    place = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    mine, theirs = os.pipe()
    janitor = subprocess.Popen(
        [sys.executable, __file__, "--clean", str(place), str(mine)], pass_fds=[mine], start_new_session=True
    )
    os.close(mine)
    try:
        yield place
    finally:
        os.close(theirs)  # signals the cleaning process; the kernel does the same if this process is killed
        janitor.wait()


class Cluster:
    """A private server that is starting."""

    def __init__(self, home: Path, policy: str) -> None:
        self.home, self.policy = home, policy
        command = [sys.executable, "-m", "shoal.cli.main", "up", "--home", str(home), "--gpus", str(GPUS)]
        self._up = subprocess.Popen(
            [*command, "--policy", policy],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def client(self) -> Client:
        """A client, once the server is up."""
        _, said = self._up.communicate()
        if self._up.returncode:
            log = self.home / "server.log"
            last = log.read_text(errors="replace")[-2000:].strip() if log.exists() else "it wrote no log"
            raise ShoalError(f"the cluster did not start: {said.strip().removeprefix('shoal: ')}\n{last}")
        return Client(home=self.home)


def clean(place: Path, pipe: int) -> None:
    """Wait until the demo ends; then stop its servers and workers, and remove its directory."""
    import psutil

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(pipe, 1)
    for home in place.iterdir():
        with contextlib.suppress(Exception), Client(home=home, timeout_s=5) as client:
            client.shutdown()
    deadline_s = time.monotonic() + 5
    quiet = 0
    while quiet < 3:  # a process may have started another one just before it ended
        left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _of_place(p, str(place))]
        left += _workers(place)
        quiet = 0 if left else quiet + 1
        for process in left if time.monotonic() > deadline_s else ():
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    shutil.rmtree(place, ignore_errors=True)


def _of_place(process: Any, place: str) -> bool:
    """Whether the demo started the process: a Python with the random path of the directory in its arguments."""
    import psutil

    try:
        given = [v for k, v in process.environ().items() if k.startswith("SHOAL_")]
        if "python" in process.name():
            given += process.cmdline()
    except psutil.Error:
        return False
    return any(place in text for text in given)


def _workers(place: Path) -> list[Any]:
    """Keepers and workers that outlived their server, by the pids and start times that the keepers recorded."""
    import psutil

    from shoal.executors.keeper import start_time

    found = []
    for path in place.glob("*/jobs/*/workers/*/started"):
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            said = json.loads(path.read_text())
            for who in ("keeper_", ""):
                pid, began = said[f"{who}pid"], said[f"{who}start_time"]
                if began is not None and start_time(pid) == began:
                    found.append(psutil.Process(pid))
    return found


def play(
    console: Console, cluster: Cluster, arrivals: Sequence[Arrival], *, limit_s: float, plain: bool
) -> Run:
    """Submit the jobs at their times and watch until all are over."""
    run = Run(cluster.policy)
    with contextlib.ExitStack() as stack:
        began_s = time.monotonic()
        admin = stack.enter_context(cluster.client())
        if any(arrival.elastic for arrival in arrivals):
            warm_up(admin)
        console.print(f"ready after {time.monotonic() - began_s:.0f} s: the server is up and torch is loaded")
        users = {}
        for name in dict.fromkeys(a.user for a in arrivals):
            # The demo's own account for the jobs of all: nobody else uses this cluster.
            root = os.geteuid() == 0
            admin.create_user(name, account=pwd.getpwuid(0).pw_name if root else None, same_account=not root)
            token = admin.create_token(user=name).token
            users[name] = stack.enter_context(Client(admin.address, token))
        live = None if plain else stack.enter_context(Live(console=console, auto_refresh=False))
        started_s = time.monotonic()
        waiting = list(arrivals)
        shown: dict[str, str] = {}
        while True:
            now_s = time.monotonic() - started_s
            while waiting and waiting[0].at_s <= now_s:
                arrival = waiting.pop(0)
                users[arrival.user].submit(arrival.spec())
            run.jobs = {job.name: job for job in reversed(admin.jobs()) if job.user in users}
            if live is not None:
                live.update(picture(run, now_s), refresh=True)
            else:
                tell_changes(console, run, now_s, shown)
            if run.why is None and run.policy != "fifo" and not waiting:
                run.why = interesting(admin, list(run.jobs.values()), patience=now_s < arrivals[-1].at_s + 8)
                if run.why is not None and plain:
                    console.print("\n".join(["", f"$ shoal why {run.why.job.name}", *explain(run.why), ""]))
            if not waiting and all(job.state.is_final for job in run.jobs.values()):
                failed = [job for job in run.jobs.values() if job.state.value == "failed"]
                run.last_lines = {
                    job.name: [line.text for line in admin.logs(job.id, tail=8)] for job in failed
                }
                break
            run.cut_off = now_s > limit_s
            if run.cut_off:
                break
            time.sleep(0.2)
    run.took_s = time.monotonic() - started_s
    return run


def interesting(client: Client, jobs: Sequence[Job], *, patience: bool) -> Why | None:
    """The reason of a waiting job, else of a job below its maximum; preferably once its speed is known."""
    if patience and not any(job.speed for job in jobs):
        return None
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
        why = "" if job.reason is None or job.state.is_final else brief(job.reason.sentence)
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
        line = f"{job.name:<12} {job.state.value:<10} {counted(job.gpus, 'GPU')}"
        if shown.get(job.name) != line:
            shown[job.name] = line
            because = f"  ({reason(job)})" if reason(job) else ""
            console.print(f"{now_s:5.1f} s  {line}{because}")


def summary(console: Console, runs: Sequence[Run]) -> None:
    """How each job spent its time, and both policies side by side."""
    for run in runs:
        console.print(where_time_went(run))
        for job in run.jobs.values():
            if job.state.value == "failed":
                console.print(f"{job.name} failed: {job.message}. Its last output:", markup=False)
                console.print(
                    "\n".join(f"  {line}" for line in run.last_lines.get(job.name, [])), markup=False
                )
    names = list(dict.fromkeys(name for run in runs for name in run.jobs))
    console.print("seconds from submission to end", style="italic")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.policy, justify="right", no_wrap=True)
    for name in names:
        table.add_row(name, *(in_words(completion_s(run.jobs.get(name))) for run in runs))
    means = [mean_s(run) for run in runs]
    table.add_row("average", *(in_words(mean) for mean in means), style="bold")
    table.add_row("all done", *(in_words(None if run.cut_off else run.took_s) for run in runs))
    console.print(table)
    if means[0] and means[1]:
        ratio = means[0] / means[1]
        console.print(f"{runs[0].policy}: the average job takes {ratio:.2f} of its time under fifo.")
    if any(run.cut_off for run in runs):
        console.print("This machine is too busy: jobs were stopped to stay within two minutes.")


def where_time_went(run: Run) -> Table:
    table = Table(
        title=f"policy {run.policy}: seconds",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    for head in ("", "ended", "waited", "ran", "paused", "resizes", "stood still", "GPU-s"):
        table.add_column(head, justify="left" if head in ("", "ended") else "right", no_wrap=True)
    for job in run.jobs.values():
        seconds = [f"{s:.1f}" for s in (job.waiting_s, job.running_s, job.paused_s)]
        still = f"{job.stalled_s:.2f}" if job.resizes else "-"
        table.add_row(job.name, job.state.value, *seconds, str(job.resizes), still, f"{job.gpu_s:.0f}")
    return table


def completion_s(job: Job | None) -> float | None:
    if job is None or job.finished_at is None:
        return None
    return (job.finished_at - job.submitted_at).total_seconds()


def mean_s(run: Run) -> float | None:
    """The mean completion time, if every job is done: without slow jobs it would be too low."""
    lengths = [length for job in run.jobs.values() if (length := completion_s(job)) is not None]
    return None if run.cut_off or not lengths else sum(lengths) / len(lengths)


def in_words(seconds: float | None) -> str:
    return "stopped" if seconds is None else f"{seconds:.1f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clean"]:
        clean(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
