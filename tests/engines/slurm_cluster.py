"""A real Slurm cluster on loopback: munged, slurmctld and two slurmd, all children of the test.

Jobs are submitted by an ordinary user: the cluster's `bin` directory has the user's commands, each of which gives up
root first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .absent import skip

USER = 65534
COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol", "sdiag")
CONF = """\
ClusterName=t
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.sock,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/ctld.pid
SlurmdPidFile={dir}/run/slurmd-%n.pid
SlurmctldLogFile={dir}/log/ctld.log
SlurmdLogFile={dir}/log/slurmd-%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
GresTypes=gpu
CommunicationParameters=NoInAddrAny
SlurmdTimeout=5
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
InactiveLimit=0
FirstJobId={first}
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName=g1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:{a}:4 Feature={a},rack0
NodeName=g2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:{b}:4 Feature={b},rack1
PartitionName=main Nodes=g1,g2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=polite Nodes=g1,g2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=g1,g2 MaxTime=INFINITE State=UP PriorityTier=9
"""
GRES = """\
NodeName=g1 Name=gpu Type={a} File={dir}/dev/g1-gpu[0-3]
NodeName=g2 Name=gpu Type={b} File={dir}/dev/g2-gpu[0-3]
"""

CGROUP_MOUNT = Path("/sys/fs/cgroup")
CGROUP = f"""\
CgroupPlugin=cgroup/v1
CgroupMountpoint={CGROUP_MOUNT}
"""


def why_not() -> str | None:
    """Why a cluster cannot be started here. None: it can."""
    absent = [program for program in ("munged", "slurmctld", "slurmd", "sbatch") if not _find(program)]
    if absent:
        return (
            f"{', '.join(absent)} not installed: apt-get install -y --no-install-recommends slurm-wlm munge"
        )
    return None if os.geteuid() == 0 else "slurmd starts jobs of other users only as root"


def need_slurm() -> None:
    if reason := why_not():
        skip(f"NO SLURM TESTS: {reason}")


def tracking() -> str:
    """The way of tracking processes that real clusters use, where this machine allows it."""
    freezer = CGROUP_MOUNT / "freezer"
    return "cgroup" if (freezer / "tasks").exists() and os.access(freezer, os.W_OK) else "linuxproc"


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class SlurmCluster:
    """Starts with the constructor and ends with `stop`. `out` is a directory that the jobs can write to."""

    def __init__(
        self,
        types: tuple[str, str] = ("a100", "v100"),
        proctrack: str = "linuxproc",
        grace_s: int = 8,
    ) -> None:
        """`grace_s`: between the announcement of a preemption in the partition `polite` and the preemption."""
        # Not below pytest's own directory, which it closes to other users.
        self.dir = directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("run", "log", "state", "spool", "dev", "bin", "out"):
            (directory / name).mkdir()
        directory.chmod(0o755)
        self.out = directory / "out"
        self.out.chmod(0o777)
        for node in ("g1", "g2"):
            for gpu in range(4):
                os.mknod(directory / "dev" / f"{node}-gpu{gpu}", 0o20666, os.makedev(1, 3))
        ports = _free_ports(3)
        self.conf = directory / "slurm.conf"
        a, b = types
        # The cgroup of a job is named for its id, also that of a job of another cluster on this machine.
        first = 1000 * (os.getpid() % 60000 + 1)
        self.conf.write_text(
            CONF.format(
                dir=directory, ports=ports, a=a, b=b, proctrack=proctrack, first=first, grace_s=grace_s
            )
        )
        (directory / "cgroup.conf").write_text(CGROUP)
        (directory / "gres.conf").write_text(GRES.format(dir=directory, a=a, b=b))
        self.environ = dict(
            os.environ, SLURM_CONF=str(self.conf), PATH=f"{directory}/bin:{os.environ['PATH']}"
        )
        for name in COMMANDS:
            shim = directory / "bin" / name
            drop = f"$([ $(id -u) = 0 ] && echo setpriv --reuid={USER} --regid={USER} --clear-groups)"
            shim.write_text(f'#!/bin/sh\nexec {drop} {_find(name)} "$@"\n')
            shim.chmod(0o755)
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise

    def _start_all(self) -> None:
        key, run = self.dir / "munge.key", self.dir / "run"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged", "--foreground", "--force", f"--socket={run}/munge.sock", f"--key-file={key}",
            f"--pid-file={run}/munged.pid", f"--log-file={self.dir}/log/munged.log", f"--seed-file={run}/munged.seed",
        )  # fmt: skip
        wait_for(lambda: (run / "munge.sock").exists(), "munged listens")
        self._start("slurmctld", "-D", "-i", "-f", str(self.conf))
        self.start_node("g1")
        self.start_node("g2")
        wait_for(
            lambda: self.admin("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 2,
            "nodes idle",
        )

    def _start(self, program: str, *argv: str, name: str | None = None) -> None:
        path = _find(program)
        assert path is not None
        log = (self.dir / "log" / f"{name or program}.out").open("ab")
        self._processes[name or program] = subprocess.Popen(
            [path, *argv], stdout=log, stderr=log, env=self.environ
        )
        log.close()

    def set_clock_ahead(self, ahead_s: int) -> None:
        """Put the controller's clock ahead of all others, as squeue and sdiag tell its time to the user."""
        for name in ("squeue", "sdiag"):
            self._pipe(name, f"perl -pe 's/\\b(\\d{{10}})\\b/$1 + {ahead_s}/ge'")

    def say(self, *, proctrack: str) -> None:
        """`scontrol show config` tells the user that processes are tracked in this way."""
        self._pipe("scontrol", f"sed 's|proctrack/.*|proctrack/{proctrack}|'")

    def _pipe(self, name: str, through: str) -> None:
        """Change what a command tells the user."""
        shim, real = self.dir / "bin" / name, self.dir / "bin" / f"real-{name}"
        if not real.exists():
            shim.rename(real)
        shim.write_text(f'#!/bin/bash\nset -o pipefail\n{real} "$@" | {through}\n')
        shim.chmod(0o755)

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, "-f", str(self.conf), name=node)

    def kill_node(self, node: str) -> None:
        """SIGKILL of slurmd. The jobs of the node run on."""
        process = self._processes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def kill_controller(self) -> None:
        process = self._processes.pop("slurmctld")
        process.send_signal(signal.SIGTERM)
        process.wait()

    def start_controller(self) -> None:
        self._start("slurmctld", "-D", "-i", "-f", str(self.conf))

    def admin(self, program: str, *argv: str) -> str:
        """The output of a Slurm command, run as root."""
        path = _find(program)
        assert path is not None
        return subprocess.run(
            [path, *argv], env=self.environ, capture_output=True, text=True, timeout=30
        ).stdout

    def jobs(self) -> list[str]:
        """Ids of all jobs that have not ended."""
        return self.admin("squeue", "-h", "-o", "%i").split()

    def stop(self) -> None:
        try:
            if "slurmctld" in self._processes and self.jobs():
                for node in ("g1", "g2"):
                    if node not in self._processes:
                        self.start_node(node)
                self.admin("scancel", "--full", *self.jobs())
                wait_for(lambda: not self.jobs(), "all jobs ended")
        finally:
            for name in ("g1", "g2", "slurmctld", "munged"):
                if process := self._processes.pop(name, None):
                    process.terminate()
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
            for node in ("g1", "g2"):
                group = CGROUP_MOUNT / "freezer" / f"slurm_{node}"
                for path in [*sorted(group.rglob("*/"), reverse=True), group]:
                    with contextlib.suppress(OSError):
                        path.rmdir()
            shutil.rmtree(self.dir)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)
