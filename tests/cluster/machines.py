"""Machines on this one: an agent in namespaces of its own, which cannot see the server's home."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_cluster import Cluster, eventually

needs_namespaces = pytest.mark.usefixtures("namespaces")


class Machine:
    """Processes, /dev/shm and a loopback address of its own. A supervisor starts the agent again when it is killed."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        name: str,
        address: str,
        gpus: int = 2,
        join: str | None = None,
        hidden: tuple[Path, ...] = (),
        preload: Path | None = None,
        network: str | None = None,
    ) -> None:
        """`join`: where it reaches the server, if not at its own address. `hidden`: directories that it cannot see.

        `preload`: a library of all its processes, whatever their environment. `network`: the name of its network
        namespace, if it has one.
        """
        self.cluster, self.name, self.address = cluster, name, address
        self._network = ["ip", "netns", "exec", network] if network is not None else []
        self._hidden = (cluster.home, *hidden, Path("/dev/shm"))
        self._preload = preload
        self.state = directory / name
        self.state.mkdir()
        made = cluster.json("node", "join-token", "create")
        self.token = self.state / "token"
        self.token.write_text(made["token"])
        words = ["--join", join or made["address"], "--token-file", str(self.token), "--name", name]
        words += ["--gpus", str(gpus), "--address", address, "--state", str(self.state)]
        self.command = [sys.executable, "-m", "shoal.cli.main", "agent", *words]
        self.process: subprocess.Popen[bytes] | None = None
        self.boot()

    def boot(self) -> None:
        run = f"{shlex.join(self.command)} >> {shlex.quote(str(self.state / 'log'))} 2>&1"
        hidden = " && ".join(f"mount -t tmpfs none {shlex.quote(str(path))}" for path in self._hidden)
        if self._preload is not None:
            etc = self.state / "etc"
            shutil.copytree("/etc", etc, symlinks=True, dirs_exist_ok=True)
            (etc / "ld.so.preload").write_text(f"{self._preload}\n")
            hidden += f" && mount --bind {shlex.quote(str(etc))} /etc"
        script = f"{hidden} && while true; do {run}; sleep 0.1; done"
        command = [
            "unshare",
            "--pid",
            "--mount",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
        ]
        env = {k: v for k, v in self.cluster.env.items() if k != "SHOAL_HOME"}
        self.process = subprocess.Popen([*self._network, *command, script], env=env, start_new_session=True)

    def _processes(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    @property
    def agent(self) -> int:
        """The pid of the agent."""

        def find() -> int | None:
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    if process.cmdline()[:4] == self.command[:4]:
                        return process.pid
            return None

        return eventually(find, what=f"an agent on {self.name}")

    def workers(self, job: int) -> dict[str, int]:
        """The pids of a job's live workers here, by the id of the worker."""
        by_inner = {_inner_pid(p.pid): p.pid for p in self._processes()}
        found = {}
        for path in (self.state / "workers").glob(f"{job}.*/started"):
            with contextlib.suppress(OSError, ValueError):
                pid = by_inner.get(json.loads(path.read_text())["pid"])
                if pid is not None:
                    found[path.parent.name] = pid
        return found

    def crash(self) -> None:
        """The machine loses its power: all its processes are gone at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def kill_agent(self) -> None:
        os.kill(self.agent, signal.SIGKILL)


def _inner_pid(pid: int) -> int | None:
    """The pid that a process has in its own namespace."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return None


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def ready(cluster: Cluster) -> set[str]:
    return {n["name"] for n in cluster.json("node", "ls")["items"] if n["state"] == "ready"}


def await_nodes(cluster: Cluster, *names: str) -> None:
    eventually(lambda: set(names) <= ready(cluster), 60, f"nodes {names}")


class World:
    """A server without GPUs of its own, and machines."""

    def __init__(self, directory: Path, lease_s: int, advertise: str = "127.0.0.1") -> None:
        self.directory, self.lease_s, self._advertise = directory, lease_s, advertise
        self.cluster = Cluster(directory / "home")
        self.machines: dict[str, Machine] = {}
        self.up()

    def up(self) -> None:
        args = ("up", "--gpus", 0, "--policy", "max-min", "--lease", f"{self.lease_s}s")
        self.cluster.shoal(*args, "--advertise", self._advertise, code=0, timeout=90)

    def machine(self, name: str, address: str | None = None, **options: Any) -> Machine:
        address = address or f"127.0.0.{2 + len(self.machines)}"
        self.machines[name] = Machine(self.cluster, self.directory, name, address, **options)
        return self.machines[name]

    def show(self, name: str) -> dict:
        return self.cluster.json("show", name)

    def step(self, name: str) -> int:
        return self.show(name)["step"] or 0

    def await_step_after(self, name: str, step: int) -> None:
        eventually(lambda: self.step(name) > step, 60, f"a step after {step}")

    def await_size(self, name: str, gpus: int) -> None:
        self.cluster.shoal("wait", name, "--for", f"size={gpus}", "--timeout", "60s", code=0, timeout=90)

    def pids(self, job: int) -> dict[str, int]:
        return {w: pid for m in self.machines.values() if m.process for w, pid in m.workers(job).items()}

    def close(self) -> None:
        for machine in self.machines.values():
            machine.crash()
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            self.cluster.kill_server()  # `down` would wait for the workers of the machines that are gone
        self.cluster.close()
