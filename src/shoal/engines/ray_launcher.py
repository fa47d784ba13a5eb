"""The side process that is a Ray driver: `python -m shoal.engines.ray_launcher`.

It reads one JSON object per line from its standard input and answers each with one line that has the same number. A Ray
driver gains threads, loses its SIGTERM handler and exits when Ray's head dies, so it must not be the control plane's
process. The actors are detached: they survive this process, and its successor finds them by name in its namespace.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from shoal.engines.base import EngineError, EngineUnavailable, RequestRefused, machine_prefix
from shoal.engines.ray_actor import STOP_GRACE_S, AgentActor, Task

ANSWER_S = 0.5
"""How long a poll waits for the actors to answer."""
CONNECT_S = 5.0
CLOSE_S = 30.0
CONFIRM_S = 60.0
"""How long an actor of an earlier launcher counts as running before it has answered."""


class RayLauncher:
    """Holds the connection to Ray and the handles of this home's actors."""

    def __init__(self, hello: dict[str, Any]) -> None:
        import ray

        self._ray = ray
        self._home = hello["home_id"]
        self._prefix = machine_prefix(self._home)
        _try_to_connect(hello["address"])
        try:
            ray.init(
                address=hello["address"],
                namespace=self._prefix.rstrip("-"),
                log_to_driver=False,
                logging_level="error",
                **({"_node_ip_address": hello["node_ip"]} if hello.get("node_ip") else {}),
            )
        except Exception as error:
            raise EngineUnavailable(
                f"Ray does not answer at {hello['address']}: {_first_line(error)}"
            ) from error
        self._answers: dict[str, Any] = {}  # outstanding status calls by actor name
        self._known: dict[str, dict[str, Any]] = {}
        #: Actors of an earlier launcher that have not answered yet. Their agents may well run.
        self._inherited = set(self._names())
        self._began_s = time.monotonic()

    def version(self) -> str:
        return str(self._ray.__version__)

    def offers(self, drained: list[str]) -> list[dict[str, Any]]:
        """The GPUs and type of each node without an agent of this home."""
        free = self._free_gpus()
        nodes = sorted(self._untaken(drained), key=lambda node: _by_free_gpus(node, free))
        return [{"gpus": node["gpus"], "gpu_type": node["gpu_type"]} for node in nodes if node["gpus"]]

    def _untaken(self, drained: list[str]) -> list[dict[str, Any]]:
        taken = {_node_of(name) for name in self._names()}
        return [node for node in self._nodes() if node["id"] not in taken and node["name"] not in drained]

    def request(
        self, gpus: int | None, gpu_type: str | None, drained: list[str], commands: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        fitting = [
            node
            for node in self._untaken(drained)
            if node["gpus"] >= (gpus if gpus is not None else 1) and gpu_type in (None, node["gpu_type"])
        ]
        if not fitting:
            what = f"{'at least 1' if gpus is None else gpus} {gpu_type or ''} GPU".replace("  ", " ")
            n = len(self._names())
            raise RequestRefused(
                f"Ray has no further node with {what}; {n} node{' runs' if n == 1 else 's run'} an agent already"
            )
        free = self._free_gpus()
        fitting.sort(key=lambda node: _by_free_gpus(node, free))
        return [
            self._create(node, node["gpus"] if gpus is None else gpus, command)
            for node, command in zip(fitting, commands)
        ]

    def _create(self, node: dict[str, Any], gpus: int, command: dict[str, Any]) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"{self._prefix}{gpus}gpu-{node['id']}"
        actor = self._ray.remote(AgentActor).options(
            name=name,
            lifetime="detached",
            num_gpus=gpus,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["id"], soft=False),
        )
        told = {
            "SHOAL_GPU_TYPE": node["gpu_type"],
            "SHOAL_RACK": node["rack"],
            "SHOAL_DOMAIN": node["domain"],
            "SHOAL_ADDRESS": node["address"],
        }
        task = Task(
            home=self._home,
            actor=name,
            agent=node["name"],
            node=node["name"],
            gpus=gpus,
            argv=tuple(command["argv"]),
            env=command["env"],
            files={file: base64.b64decode(data) for file, data in command["files"].items()},
            told={key: value for key, value in told.items() if value},
        )
        actor.remote(task)
        return self._machine(name, node, "requested")

    def poll(self) -> list[dict[str, Any]]:
        nodes = {node["id"]: node for node in self._nodes()}
        free = self._free_gpus()
        names = self._names()
        for name in names:
            if name not in self._answers:
                self._answers[name] = self._handle(name).status.remote()
        waiting = [self._answers[name] for name in names]
        if waiting:
            self._ray.wait(waiting, num_returns=len(waiting), timeout=ANSWER_S)
        lost = sorted(self._known.keys() - set(names))
        found = [self._look_at(name, nodes.get(_node_of(name)), free) for name in names]
        found += [self._gone(name, "Ray does not know the actor any more") for name in lost]
        self._known = {m["id"]: m for m in found if m["state"] != "gone"}
        return found

    def _look_at(self, name: str, node: dict[str, Any] | None, free: dict[str, float]) -> dict[str, Any]:
        if node is None:
            self._kill(name)
            return self._gone(name, "Ray reports that the node is dead")
        ready, _ = self._ray.wait([self._answers[name]], timeout=0)
        if not ready:
            if name in self._inherited and time.monotonic() - self._began_s < CONFIRM_S:
                return self._machine(name, node, "up", "the actor has not answered yet")
            if self._known.get(name, {}).get("state") in ("up", "starting"):
                return self._machine(
                    name, node, "starting", "the actor does not answer; Ray restarts it if it is dead"
                )
            reason = (
                f"{_gpus_of(name)} GPUs requested, {free.get(node['id'], 0.0):g} free on node {node['name']}"
            )
            return self._machine(name, node, "pending", reason)
        self._inherited.discard(name)
        try:
            status = self._ray.get(self._answers.pop(name))
        except self._ray.exceptions.RayError as error:  # died, or its node is dead and it cannot restart
            if isinstance(error, self._ray.exceptions.ActorUnavailableError):
                return self._machine(name, node, "starting", "Ray restarts the actor")
            self._kill(name)
            return self._gone(name, _last_line(error))
        if status["ended"] is not None:
            self._kill(name)
            return self._gone(name, status["ended"])
        return self._machine(name, node, "up")

    def release(self, names: list[str]) -> None:
        """End the agents, then the actors. An actor that is pending or does not answer is killed at once."""
        mine = [name for name in self._names() if name in names]
        stopping = [
            self._handle(name).stop.remote()
            for name in mine
            if self._known.get(name, {}).get("state") == "up"
        ]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_GRACE_S + 2.0)
        for name in mine:
            self._kill(name)

    def close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_S
        while names := self._names():
            if time.monotonic() > deadline_s:
                raise EngineError(f"Ray has not ended these actors: {', '.join(names)}")
            with contextlib.suppress(EngineError):  # one has ended meanwhile: look again
                self.poll()
                self.release(names)
            time.sleep(0.1)

    def _kill(self, name: str) -> None:
        self._answers.pop(name, None)
        with contextlib.suppress(ValueError):  # it is gone already
            self._ray.kill(self._ray.get_actor(name), no_restart=True)

    def _handle(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError as error:
            raise EngineError(
                f"the actor {name} ended while it was looked at: {_first_line(error)}"
            ) from None

    def _names(self) -> list[str]:
        return sorted(name for name in self._ray.util.list_named_actors() if name.startswith(self._prefix))

    def _nodes(self) -> list[dict[str, Any]]:
        return [describe_node(node) for node in self._ray.nodes() if node["Alive"]]

    def _free_gpus(self) -> dict[str, float]:
        from ray._private.state import available_resources_per_node

        return {node: float(free.get("GPU", 0.0)) for node, free in available_resources_per_node().items()}

    def _machine(self, name: str, node: dict[str, Any], state: str, reason: str = "") -> dict[str, Any]:
        kept = {key: node[key] for key in ("gpu_type", "rack", "domain")}
        machine = {"id": name, "agent": node["name"], "state": state, "node": node["name"], "reason": reason}
        machine |= kept
        machine["gpus"] = _gpus_of(name)
        self._known[name] = machine
        return machine

    def _gone(self, name: str, reason: str) -> dict[str, Any]:
        before = self._known.get(name, {"id": name, "agent": "", "gpus": _gpus_of(name)})
        return {**before, "state": "gone", "reason": reason}


def _try_to_connect(address: str) -> None:
    """Raise EngineUnavailable at once if nothing listens there: Ray itself would try for more than a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # `auto`, or an address that only Ray understands
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise EngineUnavailable(
            f"Ray does not answer at {address}: {why}; start it with `ray start --head`, or give another --ray-address"
        ) from None


def describe_node(node: dict[str, Any]) -> dict[str, Any]:
    """Ray's record of a node in Shoal's words. Labels name its GPU type, rack and domain."""
    labels, resources = node.get("Labels") or {}, node.get("Resources") or {}
    types = [key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")]
    gpu_type = labels.get("ray.io/accelerator-type") or labels.get("gpu") or (types[0] if types else "")
    return {
        "id": node["NodeID"],
        "name": _plain(node.get("NodeName") or node["NodeManagerHostname"]),
        "address": node["NodeManagerAddress"],
        "gpus": int(resources.get("GPU", 0)),
        "gpu_type": gpu_type.lower(),
        "rack": labels.get("rack", ""),
        "domain": labels.get("domain") or labels.get("ray.io/availability-zone", ""),
    }


def _plain(name: str) -> str:
    """A name that a directory can have. Ray names a node by its address by default."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip(".-") or "node"


def _by_free_gpus(node: dict[str, Any], free: dict[str, float]) -> tuple[float, str]:
    return -free.get(node["id"], 0.0), node["name"]


def _node_of(name: str) -> str:
    return name.rpartition("-")[2]


def _gpus_of(name: str) -> int:
    found = re.search(r"-(\d+)gpu-", name)
    return int(found[1]) if found else 0


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    """The cause: Ray's messages about actors begin with general words or with a traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(launcher: RayLauncher | None, command: dict[str, Any]) -> tuple[RayLauncher | None, Any]:
    do = command["do"]
    if do == "hello":
        return RayLauncher(command), None
    if launcher is None:
        raise EngineError("the first command must be hello")
    if do == "request":
        wanted = command["gpus"], command["gpu_type"], command["drained"]
        return launcher, launcher.request(*wanted, command["commands"])
    if do == "offers":
        return launcher, launcher.offers(command["drained"])
    if do == "version":
        return launcher, launcher.version()
    if do == "poll":
        return launcher, launcher.poll()
    if do == "release":
        launcher.release([command["machine"]])
        return launcher, None
    if do == "close":
        launcher.close()
        return launcher, None
    raise EngineError(f"there is no command {do!r}")


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints to the standard output, which carries the answers: give it the standard error instead.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    launcher: RayLauncher | None = None
    for command in _commands():
        reply: dict[str, Any]
        try:
            launcher, result = _answer(launcher, command)
            reply = {"result": result}
        except ModuleNotFoundError as error:
            words = f"{error}. Install it with: pip install 'shoal[ray]'"
            reply = {"error": words, "kind": "EngineUnavailable"}
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, EngineError) else "EngineUnavailable"
            words = str(error) if isinstance(error, EngineError) else f"Ray failed: {_first_line(error)}"
            reply = {"error": words, "kind": kind}
        print(json.dumps({"number": command.get("number"), **reply}), file=out, flush=True)


if __name__ == "__main__":
    main()
