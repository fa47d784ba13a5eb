"""Machines from Ray: one detached actor per node. The Ray client runs in a process of its own, `ray_launcher`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import sys
from collections.abc import Collection, Sequence
from typing import Any

from shoal.engines.base import (
    AgentCommand,
    EngineError,
    EngineUnavailable,
    Machine,
    MachineRequest,
    MachineState,
    NewMachine,
    RequestRefused,
)
from shoal.engines.ray_actor import STOP_GRACE_S

CLOSE_S = 90.0
"""How long the launcher may take to end all actors. It gives up by itself before that, and says which are left."""
DETACH_S = STOP_GRACE_S + 10.0
"""How long the launcher may take to finish the command that it is at: to return a machine takes the longest."""
_ERRORS = {"EngineUnavailable": EngineUnavailable, "RequestRefused": RequestRefused}


class RayEngine:
    """Implements `Engine`. The launcher is started with the first call, and again if it died."""

    title, id_word = "Ray", "actor"
    #: Ray announces no deadlines.
    clock_ahead_s: float | None = None

    def __init__(
        self,
        home_id: str,
        *,
        address: str = "auto",
        node_ip: str | None = None,
        gpus: int | None = None,
        gpu_type: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """`gpus` and `gpu_type`: what each machine shall have. None: all GPUs of its node, and any type."""
        self._hello = {"home_id": home_id, "address": address, "node_ip": node_ip}
        self._gpus, self._gpu_type = gpus, gpu_type
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)

    @property
    def launcher_pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def version(self) -> str:
        return str(await self._ask("version"))

    async def offers(self, *, drained: Collection[str] = ()) -> list[NewMachine]:
        """The nodes that have no agent yet, one by one. An agent is named for its node."""
        found = await self._ask("offers", drained=list(drained))
        sizes = [(node["gpus"] if self._gpus is None else self._gpus, node) for node in found]
        return [
            NewMachine(n, node["gpu_type"], 1)
            for n, node in sizes
            if n <= node["gpus"] and self._gpu_type in (None, node["gpu_type"])
        ]

    async def check(self, what: MachineRequest) -> None:
        """Ray's nodes come and go, so nothing is impossible. It must answer, though."""
        if what.options:
            raise RequestRefused(f"Ray takes no further options, not {' '.join(what.options)}")
        await self.version()

    async def request(
        self,
        what: MachineRequest,
        commands: Sequence[AgentCommand],
        *,
        avoid: Collection[str] = (),
        drained: Collection[str] = (),
    ) -> list[Machine]:
        """An agent is named for its node and finds its state there again, so no name needs to be avoided."""
        if what.options:
            raise RequestRefused(f"Ray takes no further options, not {' '.join(what.options)}")
        sent = [_encoded(command) for command in commands]
        found = await self._ask(
            "request", gpus=what.gpus, gpu_type=what.gpu_type, drained=list(drained), commands=sent
        )
        return [_machine(fields) for fields in found]

    async def release(self, machine_id: str) -> None:
        await self._ask("release", machine=machine_id)

    async def poll(self) -> list[Machine]:
        return [_machine(fields) for fields in await self._ask("poll")]

    async def detach(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), DETACH_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        try:
            await self._ask("close", timeout_s=max(CLOSE_S, self._timeout_s))
        finally:
            await self.detach()

    async def _ask(self, do: str, *, timeout_s: float | None = None, **fields: Any) -> Any:
        """Send one command and return its result. Starts the launcher if it does not run.

        A caller that is cancelled leaves its command to the launcher. The next one skips the answer.
        """
        limit_s = timeout_s or self._timeout_s
        async with self._lock:
            try:
                async with asyncio.timeout(limit_s):
                    if self._process is None or self._process.returncode is not None:
                        await self._start()
                    return await self._exchange({"do": do, **fields})
            except TimeoutError:
                await self._kill()
                raise EngineUnavailable(f"Ray did not answer within {limit_s:g} s") from None
            except EngineError:
                raise
            except OSError as error:
                await self._kill()
                raise EngineUnavailable(f"the Ray launcher ended: {error}") from None

    async def _start(self) -> None:
        """Start the launcher and connect it. One that is not connected is of no use to the next caller."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "shoal.engines.ray_launcher"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        try:
            await self._exchange({"do": "hello", **self._hello})
        except BaseException:
            await asyncio.shield(self._kill())
            raise

    async def _exchange(self, command: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        number = next(self._numbers)
        process.stdin.write(json.dumps({"number": number, **command}).encode() + b"\n")
        await process.stdin.drain()
        reply: dict[str, Any] = {}
        while reply.get("number") != number:  # it may answer a command whose caller was cancelled
            line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("it closed its output")
            reply = json.loads(line)
        if "error" in reply:
            raise _ERRORS.get(reply["kind"], EngineError)(reply["error"])
        return reply["result"]

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _encoded(command: AgentCommand) -> dict[str, Any]:
    files = {name: base64.b64encode(data).decode() for name, data in command.files.items()}
    return {"argv": list(command.argv), "env": dict(command.env), "files": files}


def _machine(fields: dict[str, Any]) -> Machine:
    return Machine(**{**fields, "state": MachineState(fields["state"])})
