"""One server: its parts, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from shoal import __version__
from shoal.agents.fleet_records import Link
from shoal.agents.main import versions
from shoal.agents.reaching import Reach
from shoal.agents.refusals import Refusal
from shoal.agents.services import AgentServices
from shoal.agents.shared import SharedProof
from shoal.core.cluster import User
from shoal.core.errors import ShoalError
from shoal.core.options import make_options
from shoal.core.words import counted
from shoal.executors.base import Executor
from shoal.executors.unknown_workers import end_unknown_workers
from shoal.policies.registry import policy_class
from shoal.server import virtual_cluster
from shoal.server.api.app import make_app
from shoal.server.api.auth import Gate
from shoal.server.api.hub import Hub
from shoal.server.api.models import Check, Role
from shoal.server.api.routes.common import Services
from shoal.server.engine.cluster_view import ClusterView
from shoal.server.engine.findings import (
    AgentFacts,
    StateDirectory,
    machine_checks,
    node_findings,
    reach_check,
    reach_findings,
)
from shoal.server.engine.setup import ServerEngine
from shoal.server.gauges import Gauges
from shoal.server.high_water import HighWater, continue_ids
from shoal.server.home import Home
from shoal.server.loop.clock import go_on, warn_of_clock
from shoal.server.loop.control_loop import ControlLoop
from shoal.server.loop.idle import IdleRule
from shoal.server.machines import Machines
from shoal.server.notify.address import Allowed
from shoal.server.notify.notifier import Notifier
from shoal.server.notify.sender import Sender
from shoal.server.options import DEFAULT_POLICY, Options, control_host, warn_of_address
from shoal.server.record_check import check_record, refuse_missing_database
from shoal.server.services.accounts import Accounts
from shoal.server.services.arrays import Arrays
from shoal.server.services.change import ChangeJob
from shoal.server.services.errors import Conflict
from shoal.server.services.events import Events
from shoal.server.services.history import History
from shoal.server.services.job_directories import JobDirectories
from shoal.server.services.job_logs import Logs
from shoal.server.services.jobs import Jobs
from shoal.server.services.join_tokens import JoinTokens, refused_name
from shoal.server.services.limits_use import LimitsUse
from shoal.server.services.nodes import Nodes
from shoal.server.services.past_profile import PastProfiles
from shoal.server.services.policy import PolicyInForce
from shoal.server.services.reasons import Reasons
from shoal.server.services.sessions import Sessions
from shoal.server.services.shares import Shares
from shoal.server.services.status import Process, Status
from shoal.server.services.submit import Submit
from shoal.server.services.tokens import Tokens
from shoal.server.services.users import Users
from shoal.server.services.webhooks import Webhooks
from shoal.server.services.what_if import WhatIf
from shoal.server.services.why import Why
from shoal.server.services.workdirs import Workdirs, uploads_in_use
from shoal.server.store.change import Row
from shoal.server.store.store import Store
from shoal.server.virtual_cluster import VirtualCluster
from shoal.wire.atomic_file import write_atomically

log = logging.getLogger("shoal.server")

ADMIN = "admin"
#: Interval between checks that the home directory exists.
HOME_S = 2.0
#: How long to wait for the agents of a virtual cluster.
JOIN_S = 30.0


class Control:
    """Makes all parts of a server. `start` and `close` are its lifetime."""

    def __init__(
        self,
        options: Options,
        executor: Executor | None = None,
        home: Home | None = None,
    ) -> None:
        """A `home` that is given is already locked by this process."""
        self.options = options
        self._described_users: Sequence[User] = ()
        if home is None:
            home = Home(options.home)
            home.take()
        self.home = home
        try:
            if options.database is None:
                refuse_missing_database(self.home)
            url = options.database or f"sqlite:///{self.home.database}"
            self.store = Store(url, where=str(options.home))
            self.clock = go_on(self.store, reset=options.reset_clock)
            unknown = check_record(self.home, self.store, self.clock.now_s())
            self.high_water = HighWater(self.home.path / "last-event")
            continue_ids(self.store, self.high_water, self.clock.now_s())
            policy, policy_options = self._policy()
            self.engine = ServerEngine(self.store, self.clock.now_s, options.engine, options.gpus)
            self._share_states()
            self.cluster = self._virtual_cluster() if executor is None else None
            self.machines = self._machines() if executor is None else None
            self.accounts = Accounts(
                self.store,
                enforced=executor is None,
                own_gpus=self.machines is not None and bool(self.machines.local.nodes()),
            )
            self.executor: Executor = executor or self.machines.executor  # type: ignore[union-attr]
            self.loop = ControlLoop(
                self.store, self.executor, self.home, self.clock,
                policy=policy, policy_options=policy_options, placement=options.placement,
                explore=options.explore, idle=self._idle_rule(), account_of=self.accounts.of,
                addresses=None if self.machines is None else self.machines.addresses, **self._sharing(),
            )  # fmt: skip
        except BaseException:
            self.home.release()
            raise
        if (warning := warn_of_clock(self.clock)) is not None:
            self.loop.warnings.append(warning)
        if unknown:
            shown = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            self.loop.warnings.append(
                f"the record does not know {counted(len(unknown), 'job')} of this home ({shown}): it is an older "
                "backup; their directories stay, their workers are ended, submit them again to continue"
            )
        self.hub = Hub()
        self.store.on_events = self._on_events
        self.hub.last_id = self.store.last_event()[0]
        self.sender = Sender(Allowed(self._webhook_hosts()))
        self.notifier = Notifier(self.store, self.hub, self.sender, self.clock.now_s)
        self.done = asyncio.Event()
        self.stop_jobs = False
        self._watcher: asyncio.Task[None] | None = None
        self._tidier: asyncio.Task[None] | None = None
        self.process = Process(self.home.path, os.getpid(), self.clock.now_s())
        self.services = self._make_services()
        self.app = make_app(self.services, hosts=options.allow_hosts)

    def _on_events(self, rows: list[Row]) -> None:
        self.high_water.write(rows[-1]["id"])
        self.hub.publish(rows)

    def _make_services(self) -> Services:
        """Give each service the parts of the control loop that it needs."""
        loop, store, now_s = self.loop, self.store, self.clock.now_s
        profiles, searches, sharing = loop.profiles, loop.searches, loop.sharing
        reasons = Reasons(loop, profiles, sharing.explanations, self.engine)
        what_if = WhatIf(loop, profiles, self.engine)
        shares = Shares(loop, loop.live_ledger, loop.idle.idle_s)
        nodes = Nodes(loop, store, self.engine, self._node_warnings)
        limit_bytes = self.options.upload_limit_bytes
        workdirs = Workdirs(self.home.workdirs, limit_bytes, lambda: uploads_in_use(loop.jobs.values()))
        limits_use = LimitsUse(loop, store)
        change = ChangeJob(loop, store, profiles, searches, self.engine)
        self.sessions = Sessions(
            loop,
            None if self.machines is None else self.machines.executor.sessions,
            lambda job, why: change.cancel(job, why),
        )
        return Services(
            gate=Gate(store, now_s),
            hub=self.hub,
            metrics=loop.metrics,
            gauges=Gauges(loop, store, shares, reasons, lambda: self.hub.last_id, loop.idle.idle_s),
            jobs=Jobs(loop, store, profiles, reasons, loop.worker_directory, loop.idle.idle_s),
            logs=Logs(store, loop.worker_directory),
            events=Events(store, lambda: self.hub.last_id),
            submit=Submit(
                loop,
                store,
                self.home,
                profiles,
                searches,
                learns_needs=lambda: sharing.on,
                workdirs=workdirs,
                engine=self.engine,
                accounts=self.accounts,
            ),
            change=change,
            reasons=reasons,
            why=Why(loop, profiles, sharing.explanations, reasons, what_if),
            what_if=what_if,
            history=History(loop, store),
            past_profiles=PastProfiles(profiles.estimator),
            shares=shares,
            policy=PolicyInForce(loop, store),
            nodes=nodes,
            join_tokens=JoinTokens(self.machines, store, nodes, now_s),
            users=Users(store, now_s, loop.jobs, lambda: loop.scheduler.cluster, loop.post, self.accounts),
            accounts=self.accounts,
            sessions=self.sessions,
            arrays=Arrays(store, loop.jobs),
            webhooks=Webhooks(store, self.notifier, self.sender, now_s),
            limits_use=limits_use,
            tokens=Tokens(store, now_s),
            status=Status(
                loop,
                store,
                nodes,
                self.clock,
                self.process,
                limit_bytes,
                limits_use.ignored,
                self._machine_checks,
                self._try_ways,
                self.accounts,
            ),
            workdirs=workdirs,
            shut_down=self.shut_down,
        )

    def _serve_agents(self, machines: Machines) -> None:
        """Provide what agents ask for, and ask them what they share."""
        proof = None
        try:
            proof = SharedProof(self.home.states)
        except OSError as error:
            self.loop.warnings.append(f"cannot write to {self.home.states}: {error.strerror}")
        addresses = machines.addresses
        addresses.shares_state = machines.shares_state
        machines.executor.services = AgentServices(
            self.services.workdirs.find, proof, lambda: (addresses.elsewhere,) if addresses.elsewhere else ()
        )

    def _agent_facts(self) -> list[AgentFacts]:
        if self.machines is None:
            return []
        services = self.machines.executor.services
        return [
            AgentFacts(
                name, agent.versions, agent.wall_offset_s, services.sharing(name),
                services.unreachable.get(name, {}),
            )
            for name, agent in self.machines.known().items()
            if agent.link is Link.CONNECTED
        ]  # fmt: skip

    def _ways(self) -> dict[str, Reach]:
        """To the agents on other machines, and to the one here if it has GPUs."""
        if self.machines is None:
            return {}
        agents, reaching = self.machines.executor.state.agents, self.machines.executor.services.reaching
        return reaching.known(name for name, agent in agents.items() if agent.link is Link.CONNECTED)

    async def _try_ways(self) -> None:
        if self.machines is not None:
            await self.machines.executor.try_ways()

    @property
    def _states(self) -> StateDirectory:
        return StateDirectory(str(self.home.states), declared=self.home.shared is not None)

    def _node_warnings(self) -> dict[str, list[str]]:
        """What is wrong with machines, by node."""
        if self.machines is None:
            return {}
        agents, known = self._agent_facts(), self.machines.executor.state.agents
        found: dict[str, list[str]] = {}
        ways = reach_findings(self._ways())
        for finding in [*node_findings(agents, versions()), *ways, *self._states.wrong(agents)]:
            for node in known[finding.node].nodes:
                found.setdefault(node.name, []).append(finding.message)
        return found

    def _machine_checks(self) -> list[Check]:
        """Of the machines that agents run on, and of the engine that provides them."""
        if self.machines is None:
            return []
        agents = self._agent_facts()
        found = machine_checks(agents, versions())
        if self.machines.trouble:
            text, _, hint = self.machines.trouble.partition("; ")
            found.append(Check(name="agents' port", status="error", message=text, hint=hint or None))
        if agents:
            found.append(self._states.check(agents))
        found += reach_check(self._ways())
        found += self.services.join_tokens.refused_checks()
        return found + self.engine.checks()

    def make_admin(self) -> None:
        """Make the first admin and its token, unless there is an admin. Only the owner of the home may read the token.

        An admin who was deleted by another one is not made again.
        """
        if not any(user["role"] == Role.ADMIN.value for user in self.store.users()):
            # Whoever can start the server may read everything anyway.
            self.services.users.add(ADMIN, Role.ADMIN, 1.0, "system", same_person=True)
        added: list[str] = []
        for user in self._described_users:
            if self.store.user(user.name) is not None:
                continue
            try:
                self.services.users.add(user.name, Role.USER, user.tickets, "system")
                added.append(user.name)
            except Conflict as error:  # the file cannot confirm that it is the same person
                self.loop.warnings.append(f"{error}; {error.hint}")
        if added and (warning := self.accounts.of_described(added)) is not None:
            self.loop.warnings.append(warning)
            log.warning(warning)
        if not self.home.admin_token.exists() and self.store.user(ADMIN) is not None:
            _, token = self.services.tokens.add(ADMIN, "made at the first start", None, "system")
            write_atomically(self.home.admin_token, token + "\n")

    def _policy(self) -> tuple[str, dict[str, str]]:
        """The policy given, else the one set last, else the default."""
        saved = self.store.get("policy") or {"name": DEFAULT_POLICY, "options": {}}
        if self.options.policy is not None:
            saved = {"name": self.options.policy, "options": self.options.policy_options}
        try:
            make_options(policy_class(saved["name"]), saved["options"])
        except ShoalError as error:
            if self.options.policy is not None:
                raise
            raise ShoalError(
                f"the policy that was set last cannot be used: {error}. "
                f"Install it again, or start with another: shoal up --policy {DEFAULT_POLICY}"
            ) from None
        with self.store.change(self.clock.now_s()) as change:
            change.put("policy", saved)
        return saved["name"], saved["options"]

    def _webhook_hosts(self) -> list[str]:
        """Hosts inside that notifications may go to: as given, else as at the last start."""
        given = self.options.webhook_hosts
        found = list(given) if given is not None else self.store.get("webhook_hosts", [])
        with self.store.change(self.clock.now_s()) as change:
            change.put("webhook_hosts", found)
        return found

    def _share_states(self) -> None:
        """Where the state of jobs is kept, apart from the home: as given, else as at the last start."""
        given = self.options.shared
        found = self.store.get("shared") if given is None else None if given == "none" else given
        if found is not None:
            self.home.keep_states_in(Path(found) / f"shoal-{self.engine.home_id}")
        with self.store.change(self.clock.now_s()) as change:
            change.put("shared", found)

    def _idle_rule(self) -> IdleRule:
        """When jobs count as idle and what follows: as given, else as at the last start, else the default."""
        before = self.store.get("idle") or {}
        given = {"after_s": self.options.idle_after_s, "action": self.options.idle_action}
        found = before | {k: v for k, v in given.items() if v is not None}
        with self.store.change(self.clock.now_s()) as change:
            change.put("idle", found)
        return IdleRule(**found)

    def _sharing(self) -> dict[str, bool]:
        """Whether GPUs are shared and jobs pre-scheduled: as given, else as at the last start, else not."""
        given = {"share": self.options.share, "pre_schedule": self.options.pre_schedule}
        before = self.store.get("sharing") or {}
        found = {k: bool(before.get(k, False)) if v is None else v for k, v in given.items()}
        with self.store.change(self.clock.now_s()) as change:
            change.put("sharing", found)
        return found

    def _machines(self) -> Machines:
        """GPUs as given, else as at the last start: a restarted server must find its workers on the same GPUs."""
        gpus, last = self.options.gpus, self.store.get("server") or {}
        if self.engine.settings is not None or self.cluster is not None:
            gpus = 0  # machines come from the engine, and this one may be a login node
        elif gpus is None and "executor" in last:
            gpus = last["executor"].get("virtual_gpus")
        advertise = self.options.advertise or self.store.get("advertise")
        listen = self.options.control_host or self.store.get("control_host")
        with self.store.change(self.clock.now_s()) as change:
            change.put("advertise", advertise)  # agents go on connecting to it after a restart
            change.put("control_host", listen)
        return Machines(
            self.home,
            virtual_gpus=gpus,
            host=listen
            or control_host(self.options.host, advertise, has_engine=self.engine.settings is not None),
            port=self.options.control_port,
            last_port=int(self.store.get("agents_port", 0)),
            advertise=advertise,
            lease_s=self.options.lease_s,
        )

    @property
    def _virtual_nodes(self) -> Path:
        return self.home.path / "nodes"

    def _virtual_cluster(self) -> VirtualCluster | None:
        """Of the file that was given, else as at the last start, unless a number of GPUs or an engine was given."""
        rows = self.store.get(virtual_cluster.KEY)
        if self.options.cluster is not None:
            if self.engine.settings is not None:
                raise ShoalError(
                    f"{self.engine.settings.kind.capitalize()} provides the machines of this home; "
                    "to try a cluster file instead: shoal up --engine none --cluster FILE"
                )
            # Its package needs what a server may not have.
            from shoal.sim.inputs.cluster_file import read_cluster

            described = read_cluster(self.options.cluster)
            rows = virtual_cluster.rows_of(described.nodes, self.options.cluster)
            self._described_users = described.users
        elif self.options.gpus is not None or self.engine.settings is not None:
            rows = None
        with self.store.change(self.clock.now_s()) as change:
            change.put(virtual_cluster.KEY, rows)
        return None if rows is None else VirtualCluster(self._virtual_nodes, rows)

    async def _nodes_are_up(self) -> None:
        """Wait for the agents that were started, for a while."""
        deadline_s = asyncio.get_running_loop().time() + JOIN_S
        while asyncio.get_running_loop().time() < deadline_s:
            if self.cluster is not None and self.cluster.names <= self.loop.table.up_names:
                return
            await asyncio.sleep(0.05)

    def _agent_refused(self, refusal: Refusal) -> None:
        text = f"{refused_name(refusal)} was refused: {refusal.why}"
        self.loop.outbox.event("node.refused", text, None, agent=refusal.agent, address=refusal.address)
        self.loop.settle_soon()

    def _agent_ends_unknown(self, agent: str, workers: Sequence[str]) -> None:
        """A restored backup does not know workers that were started after it."""
        ended = [w for w in workers if not self._is_on_record(w)]
        if ended:
            self._report_unknown(f"agent {agent} ends", ended)

    def _is_on_record(self, worker: str) -> bool:
        """Of one that is, the agent only has not heard yet that its end was recorded."""
        job = worker.partition(".")[0]
        return job.isdigit() and any(row["id"] == worker for row in self.store.workers_of(int(job)))

    def _report_unknown(self, who_ends: str, ended: Sequence[str]) -> None:
        named = f"{', '.join(ended[:20])}{', ...' if len(ended) > 20 else ''}"
        text = f"{who_ends} {counted(len(ended), 'worker')} that the record does not know: {named}"
        self.loop.warnings.append(text)
        with self.store.change(self.clock.now_s()) as change:
            change.event("worker.unknown", text, data={"workers": list(ended)})

    def _others_cannot_connect(self, why: str) -> None:
        self.loop.warnings.append(why)
        self.loop.elastic.await_machines(can_connect=False)

    def _others_can_connect(self) -> None:
        assert self.machines is not None
        self.loop.elastic.await_machines(can_connect=True)
        self.loop.warnings[:] = [w for w in self.loop.warnings if w != self.machines.trouble]
        with self.store.change(self.clock.now_s()) as change:
            change.put("agents_port", self.machines.port)
        log.info("agents connect to %s", self.machines.address)

    async def _tidy(self) -> None:
        """Delete what jobs that are over have left behind."""
        found = [self.services.workdirs.tidy_forever()]
        if self.machines is not None:
            directories = JobDirectories(self.store, self.machines.workers, self.clock.now_s)
            found.append(directories.tidy_forever())
        await asyncio.gather(*found)

    async def _watch_home(self) -> None:
        """End the server when its home is removed: nobody could find it or its jobs any more."""
        while self.home.is_held:
            await asyncio.sleep(HOME_S)
        log.error("the home %s is gone: ending the server and all jobs", self.home.path)
        self.shut_down(stop_jobs=True)

    def shut_down(self, stop_jobs: bool) -> None:
        self.stop_jobs = self.stop_jobs or stop_jobs
        self.done.set()

    async def start(self, sock: socket.socket) -> None:
        await self.engine.check()
        await self.loop.compile_first()
        self.make_admin()
        await self._end_unknown_workers()
        if self.machines is not None:
            self._serve_agents(self.machines)
            self.machines.take_over(self.store.unended_workers(), self.loop.worker_directory)
        await self.loop.start()
        self.notifier.start()
        self.sessions.begin()
        if self.machines is not None:
            self.machines.executor.refusals.on_refused = self._agent_refused
            self.machines.executor.on_unknown = self._agent_ends_unknown
            self.machines.on_trouble = self._others_cannot_connect
            self.machines.start(self.loop.elastic.service, self._others_can_connect)
            if self.options.control_port or self.engine.settings is not None or self.cluster is not None:
                await self.machines.wait_until_listening()
            await self.engine.start(ClusterView(self.loop, self.machines))
            # Without a cluster file, agents of the last one end.
            (self.cluster or VirtualCluster(self._virtual_nodes, ())).start(self.machines)
            if self.cluster is not None:
                await self._nodes_are_up()
        self._watcher = asyncio.create_task(self._watch_home())
        self._tidier = asyncio.create_task(self._tidy())
        bound = sock.getsockname()
        host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.process.address = f"http://{host}:{bound[1]}"
        virtual = self.machines.virtual_gpus if self.machines is not None else None
        with self.store.change(self.clock.now_s()) as change:
            change.put("server", {"port": bound[1], "executor": {"virtual_gpus": virtual}})
            change.event(
                "server.started", f"version {__version__} with {counted(self.loop.table.gpus, 'GPU')}",
                data={"policy": self.loop.policy_name, "address": self.process.address},
            )  # fmt: skip
        warning = warn_of_address(bound[0])
        if warning is not None:
            self.loop.warnings.append(warning)
            log.warning(warning)

    async def _end_unknown_workers(self) -> None:
        """A restored backup does not know the workers that were started after it, but they use GPUs."""
        known = {row["id"] for row in self.store.unended_workers()}
        ended = await end_unknown_workers(self.home.jobs, known)
        if ended:
            self._report_unknown("the server ended", ended)

    async def close(self) -> None:
        self.sessions.close()
        for task in (self._watcher, self._tidier):
            if task is not None:
                task.cancel()
        await self.notifier.close()
        await self.loop.close(stop_jobs=self.stop_jobs)
        self.home.note_not_returned(await self.engine.close(return_machines=self.stop_jobs))
        with contextlib.suppress(ShoalError), self.store.change(self.clock.now_s()) as change:
            jobs = "jobs were stopped" if self.stop_jobs else "jobs run on"
            change.event("server.stopped", f"ended as asked; {jobs}")
        self.hub.close()
        if self.cluster is not None and self.stop_jobs:
            await self.cluster.stop()
        if self.machines is not None:
            await self.machines.close()
        else:
            self.executor.close()
        self.store.close()
        self.high_water.close()
        self.home.release()
