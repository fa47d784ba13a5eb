"""The running worker: connects the wire's `Member` to the control link, process groups and the state's receiver."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

import torch
from shoal.torch.group import FORM_TIMEOUT_S, BoardStore, Cancelled, form_gloo, form_nccl, gather
from shoal.torch.link import ControlLink
from shoal.torch.meter import Meter
from shoal.torch.receiver import Receiver
from shoal.torch.state_files import StateFiles
from shoal.torch.stream import Streams
from shoal.torch.transfer import Link, sources_of
from shoal.wire import auth
from shoal.wire.channel import Channel
from shoal.wire.job_files import FILES, FileClient
from shoal.wire.member import Build, Drop, Effect, Enter, Entries, Interrupt, Member, Quit
from shoal.wire.messages import Kind, Order, Phase, Plan, Report, Status
from shoal.wire.tls import PinnedTls

log = logging.getLogger("shoal.torch")

# Each timeout of a wait is an exception with a C++ backtrace (tens of ms), so timeouts must be rare. The death of a
# peer ends the wait at once; this interval only bounds how late an interrupt by the coordinator is seen.
POLL = timedelta(seconds=1)
AT_ONCE = timedelta(milliseconds=1)
ANY_HOST = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this worker, from its environment."""

    job: str
    worker: str
    control: str
    key: auth.JobKey
    #: What workers on other machines connect to.
    host: str
    checkpoint: str | None
    patience_s: float
    #: A directory with the job's own files that the control plane shares; None: they go through the control plane.
    state_directory: str | None = None
    state_bytes_per_s: float | None = None
    #: The fingerprint of the control plane's certificate; None: it is on this machine, and TLS is not needed.
    certificate: str | None = None
    #: Where the control plane of this machine writes its address if it had to change it.
    address_file: str | None = None
    #: What it listens on, if not on `host`.
    bind: str = ""

    @property
    def tls(self) -> PinnedTls | None:
        return None if self.certificate is None else PinnedTls(self.certificate)

    @property
    def gloo_host(self) -> str:
        """Gloo listens on one address and tells the other members just that one."""
        return self.host if self.bind in ANY_HOST else self.bind

    @staticmethod
    def from_environment() -> Identity | None:
        """None outside Shoal. See docs/wire.md for the variables."""
        env = os.environ
        if "SHOAL_CONTROL" not in env:
            _refuse_to_train_alone(env)
            return None
        missing = [k for k in ("SHOAL_JOB", "SHOAL_WORKER") if k not in env]
        if missing:
            raise RuntimeError(f"SHOAL_CONTROL is set but {missing[0]} is not: start workers through Shoal")
        return Identity(
            job=env["SHOAL_JOB"],
            worker=env["SHOAL_WORKER"],
            control=env["SHOAL_CONTROL"],
            key=_key(env),
            host=env.get("SHOAL_HOST", "127.0.0.1"),
            checkpoint=env.get("SHOAL_CHECKPOINT"),
            patience_s=_number(env, "SHOAL_PATIENCE_S", 3600.0),
            state_directory=env.get("SHOAL_STATE_DIR"),
            state_bytes_per_s=_number(env, "SHOAL_STATE_BYTES_PER_S", 0.0) or None,
            certificate=env.get("SHOAL_CONTROL_CERTIFICATE"),
            address_file=env.get("SHOAL_CONTROL_FILE"),
            bind=env.get("SHOAL_BIND", ""),
        )


def _refuse_to_train_alone(env: Any) -> None:
    """In a job of Shoal that has several GPUs but is not live, each process would train by itself."""
    processes = max(
        _number(env, "WORLD_SIZE", 1), _number(env, "SHOAL_GPUS", 1), _number(env, "SHOAL_NODES", 1)
    )
    if "SHOAL_JOB" in env and processes > 1:
        raise RuntimeError(
            "this script uses shoal.torch, but its job has several GPUs and a fixed size, so every process would "
            "train alone: submit it with `--resize live` (in a job file `resize: live`) and without torchrun"
        )


def _number(env: Any, name: str, default: float) -> float:
    try:
        number = float(env.get(name, default))
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise RuntimeError(f"{name} must be a number >= 0, not {env[name]!r}")
    return number


def _key(env: Any) -> auth.JobKey:
    if "SHOAL_SECRET_FD" in env:
        try:
            with os.fdopen(int(env["SHOAL_SECRET_FD"]), "rb") as file:
                text = file.read()
        except (OSError, ValueError):
            raise RuntimeError(f"SHOAL_SECRET_FD: cannot read {env['SHOAL_SECRET_FD']!r}") from None
        return auth.JobKey.parse(text)
    if "SHOAL_SECRET_FILE" in env:
        return auth.read_key(env["SHOAL_SECRET_FILE"])
    raise RuntimeError("neither SHOAL_SECRET_FILE nor SHOAL_SECRET_FD is set: start workers through Shoal")


@dataclass(slots=True)
class Groups:
    """The process groups of one generation, for gradients, votes and exchanges, and the links to its newcomers."""

    data: Any
    vote: Any
    links: list[Link]
    #: Newcomers vote early, so what the script exchanges must not depend on the order of votes.
    meet: Any = None
    #: With shard groups: the workers that share one sharded model, and those that have the same shard of it.
    shard: Any = None
    replicas: Any = None
    #: The shard group's, for tensors in host memory.
    shard_host: Any = None


class Worker:
    def __init__(self, identity: Identity, meter: Meter, where: Callable[[], dict[str, int]]) -> None:
        self.identity = identity
        self.member = Member(identity.worker)
        self.lock = threading.Condition(threading.RLock())
        self._streams = Streams.of(identity.job, identity.host, identity.key, identity.bind)
        self.receiver = Receiver(self._streams, self.lock)
        self.interrupted = False
        self.entering: Plan | None = None
        self.quit: str | None = None
        self.cuda = False
        self._meter, self._where = meter, where
        self._stores: dict[int, BoardStore] = {}
        self._groups: dict[int, Groups] = {}
        self._retired: queue.SimpleQueue[tuple[float, Groups]] = queue.SimpleQueue()
        threading.Thread(target=self._close_retired, name="shoal-retire", daemon=True).start()
        self.files = StateFiles(
            FileClient(self._open_files, identity.patience_s), identity.state_directory, meter.note
        )
        self.link = ControlLink(
            identity.control,
            identity.key.secret,
            identity.job,
            identity.worker,
            on_order=self._on_order,
            on_connected=self._on_connected,
            status=self.status,
            report=self.report,
            patience_s=identity.patience_s,
            address_file=identity.address_file,
            tls=identity.tls,
        )

    @property
    def name(self) -> str:
        return self.identity.worker

    def _open_files(self) -> Channel:
        me = self.identity
        return Channel.open(self.link.address, me.key.secret, me.job, FILES, tls=me.tls)

    # The control link's side

    def _on_connected(self) -> None:
        with self.lock:
            self.member.reconnected()

    def status(self) -> Status:
        with self.lock:
            return self.member.status()

    def report(self) -> Report:
        return self._meter.report(**self._where())

    def _on_order(self, order: Order) -> None:
        with self.lock:
            formed = self.member.formed
            self._perform(self.member.order(order))
            self.lock.notify_all()
            answer = self.member.formed != formed or self.member.plan is not None or order.dead
        if answer:
            self.link.say()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Build(plan):
                    self._build(plan)
                case Drop(number):
                    self._drop(number)
                case Entries(number, entries):
                    if number in self._stores:
                        self._stores[number].fill(entries)
                case Interrupt():
                    self.interrupted = True
                case Enter(plan):
                    self.entering = plan
                case Quit(reason):
                    self._quit(reason)

    def _quit(self, reason: str) -> None:
        if self.quit is None:
            log.info("this worker has to quit: %s", reason)
        self.quit = reason
        if (
            self.member.phase in (Phase.STARTING, Phase.ACTIVE)
            and threading.current_thread().name == "shoal-control"
        ):
            # The script is running and would not notice. Nothing that it does is needed any more.
            os._exit(0)

    def _build(self, plan: Plan) -> None:
        store = self._stores[plan.number] = BoardStore(lambda k, v: self._publish(plan.number, k, v))
        if self.name in plan.newcomers and not (plan.kind is Kind.FIRST and plan.members[0] == self.name):
            self.receiver.expect(plan, self.name)
        threading.Thread(target=self._form, args=(plan, store), name="shoal-form", daemon=True).start()

    def _publish(self, number: int, key: str, value: str) -> None:
        with self.lock:
            self.member.publish(number, key, value)
        self.link.say()

    def _form(self, plan: Plan, store: BoardStore) -> None:
        try:
            gather(store, plan.members, self.name)
            vote = self._gloo(plan, store, plan.members, "vote")
            meet = self._gloo(plan, store, plan.members, "meet")
            if plan.group > 1:
                groups = Groups(vote, vote, [], meet)
                self._form_shard_groups(plan, store, groups)
            else:
                groups = Groups(self._on_device(vote, plan.members), vote, [], meet)
            groups.links = self._open_links(plan)
        except Cancelled:
            return
        except Exception as error:
            with self.lock:
                self._meter.note(f"generation {plan.number}: its group could not be formed: {error}")
                self.member.group_failed(plan.number)
            self.link.say()
            return
        with self.lock:
            self._groups[plan.number] = groups
            self._perform(self.member.group_formed(plan.number))
            self.lock.notify_all()
        self.link.say()

    def _gloo(self, plan: Plan, store: Any, members: Sequence[str], name: str) -> Any:
        if len(members) == 1:
            return None
        me, label = self.identity, f"{plan.number} {name}"
        return form_gloo(PrefixStore(name, store), members, self.name, me.gloo_host, me.key.secret, label)

    def _on_device(self, gloo: Any, members: Sequence[str]) -> Any:
        """The group for tensors on the model's device, beside one for host memory."""
        if not (self.cuda and gloo):
            return gloo
        return form_nccl(gloo, members, self.name, self.identity.host, self.identity.bind)

    def _form_shard_groups(self, plan: Plan, store: Any, groups: Groups) -> None:
        rank, size = plan.members.index(self.name), plan.group
        number, shard = rank // size, rank % size
        mates, same = plan.members[number * size : (number + 1) * size], plan.members[shard::size]
        groups.shard_host = self._gloo(plan, store, mates, f"group {number}")
        groups.shard = self._on_device(groups.shard_host, mates)
        groups.replicas = self._gloo(plan, store, same, f"shard {shard}")
        # Nobody goes on before all have formed theirs: a member that has entered does not show its addresses any more.
        groups.vote.allreduce([torch.zeros(1)]).wait(timedelta(seconds=FORM_TIMEOUT_S))

    def _open_links(self, plan: Plan) -> list[Link]:
        if plan.kind is Kind.RECOVER:
            return []
        receivers = plan.newcomers if plan.holders else plan.members[1:]
        links: list[Link] = []
        with contextlib.ExitStack() as undo:
            for newcomer in receivers:
                if self.name in sources_of(plan, newcomer):
                    link = Link.open(
                        plan, newcomer, self.name, self._streams, self.identity.state_bytes_per_s
                    )
                    undo.callback(link.close)
                    links.append(link)
            undo.pop_all()
        return links

    def _drop(self, number: int) -> None:
        if self.entering is not None and self.entering.number == number:
            self.entering = None
        store = self._stores.pop(number, None)
        if store is not None:
            store.cancel()
        self.receiver.forget(number)
        groups = self._groups.pop(number, None)
        if groups is not None:
            self.retire(groups)

    # The training thread's side

    def formed(self, number: int) -> Groups | None:
        return self._groups.get(number)

    def take(self, number: int) -> Groups:
        self._stores.pop(number, None)
        return self._groups.pop(number)

    def retire(self, groups: Groups | None) -> None:
        """Close groups later, in another thread: closing them at the switch would take longer than the switch."""
        if groups is None:
            return
        for link in groups.links:
            link.close()
        self._retired.put((time.monotonic() + 1.0, groups))

    def _close_retired(self) -> None:
        while True:
            due_s, groups = self._retired.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            del groups

    def wait(self, work: Any) -> bool:
        """Whether a collective completed. False if it broke or its generation is dead."""
        while True:
            try:
                work.wait(AT_ONCE if self.interrupted else POLL)
                return True
            except RuntimeError:
                if work.is_completed():
                    return _succeeded(work)  # it may have completed just after the timeout
                if self.interrupted:
                    return False

    def wait_for(self, ready: Callable[[], Any]) -> Any:
        """The first true value of `ready`, called under the lock. Ends the process if the coordinator asks for it."""
        with self.lock:
            self.lock.wait_for(lambda: self.quit is not None or ready())
            if self.quit is not None:
                self.leave()
            return ready()

    def leave(self) -> None:
        self.link.say_now()
        raise SystemExit(0)


def _succeeded(work: Any) -> bool:
    try:
        work.wait()
    except RuntimeError as error:
        log.warning("a collective broke: %s", error)
        return False
    return True
