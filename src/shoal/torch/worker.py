"""The running worker: connects the wire's `Member` to the control link, process groups and the state's receiver."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shoal.torch.group import BoardStore, Cancelled, form_gloo, form_nccl
from shoal.torch.link import ControlLink
from shoal.torch.meter import Meter
from shoal.torch.receiver import Receiver
from shoal.torch.transfer import Link, sources_of
from shoal.wire import auth
from shoal.wire.member import Build, Drop, Effect, Enter, Entries, Interrupt, Member, Quit
from shoal.wire.messages import Kind, Order, Phase, Plan, Report, Status

log = logging.getLogger("shoal.torch")

# Each timeout of a wait is an exception with a C++ backtrace (tens of ms), so timeouts must be rare. The death of a
# peer ends the wait at once; this interval only bounds how late an interrupt by the coordinator is seen.
POLL = timedelta(seconds=1)
AT_ONCE = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this worker, from its environment."""

    job: str
    worker: str
    control: str
    secret: bytes
    host: str
    checkpoint: str | None
    patience_s: float
    state_bytes_per_s: float | None = None

    @staticmethod
    def from_environment() -> Identity | None:
        """None outside Shoal. See docs/wire.md for the variables."""
        env = os.environ
        if "SHOAL_CONTROL" not in env:
            return None
        missing = [k for k in ("SHOAL_JOB", "SHOAL_WORKER") if k not in env]
        if missing:
            raise RuntimeError(f"SHOAL_CONTROL is set but {missing[0]} is not: start workers through Shoal")
        return Identity(
            job=env["SHOAL_JOB"],
            worker=env["SHOAL_WORKER"],
            control=env["SHOAL_CONTROL"],
            secret=_secret(env),
            host=env.get("SHOAL_HOST", "127.0.0.1"),
            checkpoint=env.get("SHOAL_CHECKPOINT"),
            patience_s=_number(env, "SHOAL_PATIENCE_S", 3600.0),
            state_bytes_per_s=_number(env, "SHOAL_STATE_BYTES_PER_S", 0.0) or None,
        )


def _number(env: Any, name: str, default: float) -> float:
    try:
        number = float(env.get(name, default))
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise RuntimeError(f"{name} must be a number >= 0, not {env[name]!r}")
    return number


def _secret(env: Any) -> bytes:
    if "SHOAL_SECRET_FD" in env:
        try:
            with os.fdopen(int(env["SHOAL_SECRET_FD"]), "rb") as file:
                text = file.read()
        except (OSError, ValueError):
            raise RuntimeError(f"SHOAL_SECRET_FD: cannot read {env['SHOAL_SECRET_FD']!r}") from None
        return auth.check_secret(text.strip())
    if "SHOAL_SECRET_FILE" in env:
        return auth.read_secret(env["SHOAL_SECRET_FILE"])
    raise RuntimeError("neither SHOAL_SECRET_FILE nor SHOAL_SECRET_FD is set: start workers through Shoal")


@dataclass(slots=True)
class Groups:
    """The process groups of one generation, for gradients and for the vote, and the links to its newcomers."""

    data: Any
    vote: Any
    links: list[Link]


class Worker:
    def __init__(self, identity: Identity, meter: Meter, where: Callable[[], dict[str, int]]) -> None:
        self.identity = identity
        self.member = Member(identity.worker)
        self.lock = threading.Condition(threading.RLock())
        self.receiver = Receiver(identity.host, identity.job, identity.secret, self.lock)
        self.interrupted = False
        self.entering: Plan | None = None
        self.quit: str | None = None
        self.cuda = False
        self._meter, self._where = meter, where
        self._stores: dict[int, BoardStore] = {}
        self._groups: dict[int, Groups] = {}
        self._retired: queue.SimpleQueue[tuple[float, Groups]] = queue.SimpleQueue()
        threading.Thread(target=self._close_retired, name="shoal-retire", daemon=True).start()
        self.link = ControlLink(
            identity.control,
            identity.secret,
            identity.job,
            identity.worker,
            on_order=self._on_order,
            on_connected=self._on_connected,
            status=self.status,
            report=self.report,
            patience_s=identity.patience_s,
        )

    @property
    def name(self) -> str:
        return self.identity.worker

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
            vote = form_gloo(store, plan, self.name, self.identity.host) if len(plan.members) > 1 else None
            data = form_nccl(vote, plan, self.name, self.identity.host) if self.cuda and vote else vote
            links = self._open_links(plan)
        except Cancelled:
            return
        except Exception as error:
            with self.lock:
                self._meter.note(f"generation {plan.number}: its group could not be formed: {error}")
                self.member.group_failed(plan.number)
            self.link.say()
            return
        with self.lock:
            self._groups[plan.number] = Groups(data, vote, links)
            self._perform(self.member.group_formed(plan.number))
            self.lock.notify_all()
        self.link.say()

    def _open_links(self, plan: Plan) -> list[Link]:
        if plan.kind is Kind.RECOVER:
            return []
        receivers = plan.newcomers if plan.holders else plan.members[1:]
        me, links = self.identity, []
        with contextlib.ExitStack() as undo:
            for newcomer in receivers:
                if self.name in sources_of(plan, newcomer):
                    link = Link.open(plan, newcomer, self.name, me.secret, me.job, me.state_bytes_per_s)
                    undo.callback(link.close)
                    links.append(link)
            undo.pop_all()
        return links

    def _drop(self, number: int) -> None:
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
    except RuntimeError:
        return False
    return True
