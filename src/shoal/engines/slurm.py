"""Machines from Slurm: one single-node batch job per agent, submitted by an ordinary user.

Slurm keeps all state. A job belongs to this home if its name is `shoal-HOMEID-N` and its comment has the home's id,
so a restarted launcher finds its jobs with one `squeue`. A job that holds GPUs cannot grow, hence one job per machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.engines.base import (
    AgentCommand,
    EngineError,
    EngineUnavailable,
    Machine,
    MachineRequest,
    MachineState,
    NewMachine,
    RequestRefused,
    machine_prefix,
)
from shoal.engines.commands import Finished, run_command
from shoal.engines.slurm_clock import ControllerClock
from shoal.engines.slurm_nodes import Node, parse_nodes
from shoal.engines.slurm_script import agent_name, batch_script

#: What of the submitter's environment the job gets. `--sbatch-option=--export=ALL` passes everything.
EXPORTED = "PATH,HOME,USER,LOGNAME,SHELL,LANG,LC_ALL,TZ,LD_LIBRARY_PATH,PYTHONPATH,VIRTUAL_ENV,CONDA_PREFIX,SLURM_CONF"
#: Options that this module sets and relies on.
RESERVED = {
    "--job-name", "-J", "--comment", "--nodes", "-N", "--array", "-a", "--wrap", "--signal", "--requeue",
    "--no-requeue", "--parsable", "--wait", "-W", "--test-only", "--gpus-per-node",
}  # fmt: skip
#: Slurm's job states. Those in neither table are ends.
_STATES = {
    "PENDING": MachineState.PENDING,
    "REQUEUED": MachineState.PENDING,
    "REQUEUE_FED": MachineState.PENDING,
    "REQUEUE_HOLD": MachineState.PENDING,
    "SPECIAL_EXIT": MachineState.PENDING,
    "RESV_DEL_HOLD": MachineState.PENDING,
    "SUSPENDED": MachineState.PENDING,
    "STOPPED": MachineState.PENDING,
    "CONFIGURING": MachineState.STARTING,
    "RUNNING": MachineState.UP,
    "RESIZING": MachineState.UP,
    "SIGNALING": MachineState.UP,
    "STAGE_OUT": MachineState.LEAVING,
    "COMPLETING": MachineState.LEAVING,
}
#: Ends before which Slurm kills the processes of the job, provided that the node responds.
_KILLED_ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The options of `shoal up --engine slurm`."""

    partition: str | None = None
    #: GPUs of each machine, and their type. None: as many as the nodes have, and any type.
    gpus: int | None = None
    gpu_type: str | None = None
    #: The time limit of each job. None: the partition's default.
    time_s: float | None = None
    sbatch_options: tuple[str, ...] = ()
    #: How long before the end of a job its agent is warned. Slurm may be up to 60 s early.
    warn_s: int = 120
    #: Where the output of the agents goes. The directory must exist on the nodes too. None: it is discarded.
    log_dir: Path | None = None
    command_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Row:
    """One job as squeue prints it."""

    id: str
    name: str
    state: str
    node: str
    reason: str
    #: When the job ends at the latest, in Unix time of the controller.
    end_s: float | None
    #: What the agent printed last before it failed.
    last_words: str


_FORMAT = "%i|%j|%T|%N|%r|%e|%k"


class SlurmEngine:
    """Implements `Engine` by the commands sbatch, squeue, sinfo, sdiag, scontrol and scancel."""

    title, id_word = "Slurm", "job"

    def __init__(
        self,
        home_id: str,
        options: SlurmOptions = SlurmOptions(),
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._prefix = machine_prefix(home_id)
        self._comment = f"shoal home {home_id}"
        self._options = options
        self._environ = dict(os.environ if environ is None else environ, SLURM_TIME_FORMAT="%s")
        self._machines: dict[str, Machine] = {}
        self._polled = False
        self._clock = ControllerClock()

    @property
    def clock_ahead_s(self) -> float | None:
        return self._clock.ahead_s

    async def version(self) -> str:
        await self._slurm("scontrol", "ping")
        return (await self._slurm("sinfo", "--version")).out.split()[-1]

    async def offers(self, *, drained: Collection[str] = ()) -> list[NewMachine]:
        """A machine of any type first, then one of each type that the partition has."""
        where = [f"--partition={self._options.partition}"] if self._options.partition else []
        found = parse_nodes((await self._slurm("sinfo", "--noheader", "-N", *where, "-O", Node.FORMAT)).out)
        asked_gpus, asked_type = self._options.gpus, self._options.gpu_type
        of_type: dict[str, int] = {}
        for node in found.values():
            for gpu_type, gpus in node.gpus.items():
                of_type[gpu_type] = max(of_type.get(gpu_type, 0), gpus)
        largest = max(of_type.values(), default=0)
        if asked_type is not None:
            return [NewMachine(asked_gpus or of_type.get(asked_type, 0), asked_type)]
        typed = {t: min(n, asked_gpus or n) for t, n in sorted(of_type.items()) if t}
        return [NewMachine(asked_gpus or largest), *(NewMachine(n, t) for t, n in typed.items())]

    async def check(self, what: MachineRequest) -> None:
        argv = [*self._sbatch_argv(what), "--test-only"]
        done = await self._run(*argv, stdin="#!/bin/sh\n")
        if done.code:
            raise self._error("sbatch", done, shlex.join(argv))
        if not what.gpus:
            where = f"partition {self._options.partition}" if self._options.partition else "this cluster"
            raise RequestRefused(
                f"Slurm knows of no GPU in {where} (Gres of its nodes): set --gpus-per-node, or another --partition"
            )

    async def request(
        self,
        what: MachineRequest,
        commands: Sequence[AgentCommand],
        *,
        avoid: Collection[str] = (),
        drained: Collection[str] = (),
    ) -> list[Machine]:
        argv = self._sbatch_argv(what)
        if not self._polled:
            await self.poll()  # the names of present jobs must not be used again
        accepted: list[Machine] = []
        for command in commands:
            name = self._free_name({*avoid, *drained})
            try:
                job_id = await self._submit([*argv, f"--job-name={name}"], command)
            except EngineError:
                if not accepted:
                    raise
                break
            machine = Machine(
                job_id,
                agent_name(name),
                MachineState.REQUESTED,
                gpus=what.gpus or 0,
                gpu_type=what.gpu_type or "",
            )
            self._machines[job_id] = machine
            accepted.append(machine)
        return accepted

    def _free_name(self, avoid: Collection[str]) -> str:
        """Numbers are used again, so that the cluster does not collect names of machines that are gone."""
        taken = {m.agent for m in self._machines.values()} | set(avoid)
        names = (f"{self._prefix}{number}" for number in itertools.count(1))
        return next(name for name in names if agent_name(name) not in taken)

    async def release(self, machine_id: str) -> None:
        done = await self._run("scancel", "--full", machine_id)
        if done.code and "Invalid job id" not in done.err and "already complet" not in done.err:
            raise self._error("scancel", done)

    async def poll(self) -> list[Machine]:
        rows = await self._own_jobs()
        await self._read_clock(rows.values())
        left = {m.node for m in self._machines.values() if m.node}  # a requeued job has left its node
        nodes = await self._nodes({row.node for row in rows.values() if row.node} | left)
        for job_id, row in rows.items():
            before = self._machines.get(job_id)
            state = _STATES.get(row.state)
            if state is not None:
                found = before or Machine(job_id, agent_name(row.name), state)
                seen = await self._seen(found, row, state, nodes.get(row.node))
                fenced = _requeued_cleanly(found, row, nodes) and await self._kills_all()
                self._machines[job_id] = replace(seen, fenced=fenced)
            elif before is not None:
                self._machines[job_id] = await self._ended(before, row, nodes.get(row.node))
            # Otherwise it ended before this launcher started.
        for job_id in self._machines.keys() - rows.keys():
            lost = f"Slurm does not know job {job_id} any more"
            self._machines[job_id] = replace(self._machines[job_id], state=MachineState.GONE, reason=lost)
        self._polled = True
        found_all = sorted(self._machines.values(), key=lambda m: int(m.id))
        self._machines = {m.id: m for m in found_all if m.state is not MachineState.GONE}
        return found_all

    async def detach(self) -> None:
        self._machines, self._polled = {}, False

    async def close(self, *, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left = [row for row in (await self._own_jobs()).values() if row.state in _STATES]
            if not left:
                return await self.detach()
            if time.monotonic() > deadline_s:
                jobs = ", ".join(f"{row.id} ({row.state} on {row.node or 'no node'})" for row in left)
                raise EngineError(
                    f"Slurm has not ended these jobs within {timeout_s:g} s: {jobs}. If a node does not respond, Slurm "
                    "ends its job when the node returns or is set down. Check with squeue --me"
                )
            for row in left:
                if row.state != "COMPLETING":
                    await self.release(row.id)
            await asyncio.sleep(0.2)

    def _sbatch_argv(self, what: MachineRequest) -> list[str]:
        options = self._options
        extra = [*options.sbatch_options, *what.options]
        for option in extra:
            name = re.match(r"--[^=\s]+|-.", option)
            if name is None:
                raise RequestRefused(
                    f"the sbatch option {option!r} does not begin with a hyphen; write --NAME=VALUE"
                )
            if name.group() in RESERVED:
                raise RequestRefused(f"Shoal sets the sbatch option {name.group()} itself; remove it")
        if what.gpus is None:
            raise RequestRefused("Slurm must be asked for a number of GPUs; set --gpus-per-node")
        argv = [
            "sbatch",
            "--parsable",
            "--nodes=1",
            "--ntasks=1",
            "--requeue",
            f"--signal=B:TERM@{options.warn_s}",
        ]
        argv += [f"--comment={self._comment}", f"--export={EXPORTED}", "--chdir=/", "--open-mode=append"]
        log = f"{options.log_dir}/%x.%j.log" if options.log_dir else "/dev/null"
        argv += [f"--output={log}", f"--error={log}"]
        if what.gpus:
            argv.append(f"--gpus-per-node={what.gpu_type + ':' if what.gpu_type else ''}{what.gpus}")
        if options.partition:
            argv.append(f"--partition={options.partition}")
        if options.time_s is not None:
            argv.append(f"--time={max(1, round(options.time_s / 60))}")
        return argv + extra

    async def _submit(self, argv: list[str], command: AgentCommand) -> str:
        script = batch_script(command, self._comment, warn_s=self._options.warn_s)
        done = await self._run(*argv, stdin=script)
        if done.code:
            raise self._error("sbatch", done, shlex.join(argv))
        job_id = done.out.strip().partition(";")[0]  # with several clusters: ID;CLUSTER
        if not job_id.isdigit():
            raise EngineError(f"sbatch printed no job id but {done.out.strip()!r}")
        return job_id

    async def _own_jobs(self) -> dict[str, _Row]:
        done = await self._slurm("squeue", "--noheader", "--me", "--states=all", f"--format={_FORMAT}")
        rows = {}
        for line in done.out.splitlines():
            fields = line.split("|", 6)
            if len(fields) != 7:
                continue
            job_id, name, state, node, reason, end, comment = fields
            mark, _, last_words = comment.partition(": ")
            if mark != self._comment or not re.fullmatch(re.escape(self._prefix) + "[0-9]+", name):
                continue
            end_s = float(end) if end.isdigit() else None
            rows[job_id] = _Row(job_id, name, state, node, reason, end_s, last_words)
        return rows

    async def _read_clock(self, rows: Collection[_Row]) -> None:
        """Ask slurmctld for its time if one of its deadlines is to be compared with it."""
        if not self._clock.is_fresh and any(row.end_s is not None for row in rows):
            try:
                self._clock.read((await self._run("sdiag")).out)
            except EngineUnavailable:
                self._clock.read("")  # a site may have no sdiag for users

    async def _nodes(self, names: set[str]) -> dict[str, Node]:
        if not names:
            return {}
        done = await self._slurm(
            "sinfo", "--noheader", "-N", "-n", ",".join(sorted(names)), "-O", Node.FORMAT
        )
        return parse_nodes(done.out)

    async def _seen(self, machine: Machine, row: _Row, state: MachineState, node: Node | None) -> Machine:
        """The machine with what squeue and sinfo say of it."""
        reason, leaving_at_s = "", None
        now_s, ends_at_s = time.monotonic(), row.end_s and self._clock.monotonic(row.end_s)
        if state is MachineState.PENDING:
            reason = row.reason if row.state == "PENDING" else row.state.capitalize()
        elif state is MachineState.UP and ends_at_s and ends_at_s - now_s <= self._options.warn_s:
            state, leaving_at_s = MachineState.LEAVING, ends_at_s
            reason = "the job reaches its time limit or is being preempted"
        elif state is MachineState.LEAVING:
            leaving_at_s = machine.leaving_at_s or now_s
        responds = node is None or node.responds
        if node and not responds and state is not MachineState.PENDING:
            reason = f"node {node.name} is {node.state}"
        machine = replace(
            machine, state=state, node=row.node, reason=reason, leaving_at_s=leaving_at_s, responds=responds
        )
        if node is None:
            return machine
        gpus = machine.gpus or await self._granted_gpus(row.id)
        return replace(
            machine, gpus=gpus, gpu_type=machine.gpu_type or node.gpu_type, rack=node.rack, domain=node.domain
        )

    async def _granted_gpus(self, job_id: str) -> int:
        """The GPUs of a job that an earlier launcher requested."""
        details = await self._run("scontrol", "show", "job", job_id, "--oneliner")
        granted = re.search(r"\bTresPerNode=\S*gpu(?::[^:\s,]+)??:(\d+)", details.out)
        return int(granted[1]) if granted else 0

    async def _ended(self, machine: Machine, row: _Row, node: Node | None) -> Machine:
        words = f"Slurm job {row.id} ended: {row.state}"
        details = await self._run("scontrol", "show", "job", row.id, "--oneliner")
        code = re.search(r"\bExitCode=(\d+):(\d+)", details.out)
        if row.state == "FAILED" and code:
            words += f", exit code {code[1]}" if code[1] != "0" else f", signal {code[2]}"
            words += f": {row.last_words}" if row.last_words else ""
            if self._options.log_dir:
                words += f"; its output is in {self._options.log_dir}/{row.name}.{row.id}.log"
        elif row.reason not in ("None", ""):
            words += f" ({row.reason})"
        never_ran = not machine.node and not row.node
        killed = row.state in _KILLED_ENDS and node is not None and node.responds
        fenced = never_ran or (killed and await self._kills_all())
        return replace(
            machine,
            state=MachineState.GONE,
            node=row.node or machine.node,
            reason=words,
            leaving_at_s=None,
            fenced=fenced,
        )

    async def _kills_all(self) -> bool:
        """Whether no process outlives the job that it belongs to.

        Of the ways in which Slurm tracks processes, only a cgroup keeps those whose parents have ended or that are in a
        session of their own, as the keepers of an agent that was killed.
        """
        config = await self._run("scontrol", "show", "config")
        return re.search(r"^ProctrackType\s*=\s*proctrack/cgroup\b", config.out, re.MULTILINE) is not None

    async def _run(self, *argv: str, stdin: str = "") -> Finished:
        try:
            return await run_command(
                argv, stdin=stdin, env=self._environ, timeout_s=self._options.command_timeout_s
            )
        except EngineUnavailable as error:
            raise EngineUnavailable(
                f"Slurm is not available: {error}. Run this on a login node of the cluster"
            ) from None

    async def _slurm(self, *argv: str) -> Finished:
        done = await self._run(*argv)
        if done.code:
            raise self._error(argv[0], done)
        return done

    def _error(self, command: str, done: Finished, argv: str | None = None) -> EngineError:
        words = [
            line.partition("rror: ")[2] or line
            for line in (done.err or done.out).splitlines()
            if line.strip()
        ]
        said = "; ".join(dict.fromkeys(words)) or f"exit code {done.code}"
        if any(sign in said for sign in _UNREACHABLE):
            return EngineUnavailable(f"Slurm does not answer: {command} says: {said}")
        if argv is not None:
            return RequestRefused(f"Slurm refuses the request: {said}. The command was: {argv}")
        return EngineError(f"{command} failed: {said}")


def _requeued_cleanly(before: Machine, row: _Row, nodes: Mapping[str, Node]) -> bool:
    """Whether Slurm has just taken the job's node from it and has ended there what it could.

    A job is pending again only when slurmd has reported their end, or when the node does not respond.
    """
    was_running = before.state in (MachineState.UP, MachineState.LEAVING, MachineState.STARTING)
    node = nodes.get(before.node)
    return was_running and row.state == "PENDING" and node is not None and node.responds


_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Connection refused",
    "Slurmctld(primary) at",
    "is DOWN",
    "unable to load munge",
    "Munge encode failed",
)
