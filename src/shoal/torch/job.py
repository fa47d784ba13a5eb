"""`shoal.torch` as the script sees it: a job whose workers may change between any two steps."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import pickle
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from shoal.torch.checkpoint import write_atomically
from shoal.torch.gradients import GradientBuckets, Sync, all_reduce, parameter_lines
from shoal.torch.loader import Loader
from shoal.torch.meter import Meter
from shoal.torch.order import BatchRule, Part, Position
from shoal.torch.state import ModelState, StateBox, random_state, seed_all, set_random_state
from shoal.torch.transfer import Incoming
from shoal.torch.worker import Groups, Identity, Worker
from shoal.wire.messages import Kind, Phase, Plan
from torch import nn

log = logging.getLogger("shoal.torch")


class StepKind(Enum):
    REAL = auto()
    REHEARSAL = auto()  # before joining: nothing of it counts
    CATCH_UP = (
        auto()
    )  # a newcomer's first: it adds nothing, receives the state, and applies the others' gradients
    VOID = auto()  # the synchronisation broke: the rest of the loop's body runs, but the step is done again


@dataclass(slots=True)
class Step:
    kind: StepKind
    part: Part
    samples: int
    began_s: float
    synced: bool = False
    stepped: bool = False
    counted: bool = False
    undo: bytes | None = None


class Job:
    """Made by `shoal.torch.init`."""

    def __init__(
        self,
        identity: Identity | None,
        *,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        checkpoint_every_s: float | None = None,
        checked: bool = False,
        rehearse: bool = True,
        sync: Sync = all_reduce,
    ) -> None:
        self.state = StateBox()
        self.meter = Meter()
        self.position = Position()
        self.seed = seed
        self.checkpoint_path = str(checkpoint) if checkpoint else (identity.checkpoint if identity else None)
        self.sync = sync
        self._every_s, self._saved_s = checkpoint_every_s, time.monotonic()
        self._checked = checked or os.environ.get("SHOAL_CHECKED") == "1"
        self._rehearse = rehearse
        self._loader: Loader | None = None
        self._model_state: ModelState | None = None
        self._buckets: GradientBuckets | None = None
        self._epochs = 0
        self._step: Step | None = None
        self._joined = identity is None
        self._rehearsing = False
        self._in_epochs = False
        self._catching_up: tuple[Plan, Incoming] | None = None
        self._groups: Groups | None = None
        self._contributors: tuple[int, ...] = (0,)
        self._next_contributors: tuple[int, ...] = (0,)
        self._check_next = False
        self._stepped = True
        self._pause_s = 0.0
        self._vote = torch.zeros(2)
        self._checkpoints = 0
        self._worker = Worker(identity, self.meter, self._where) if identity else None
        if self._worker is not None:
            self._worker.link.start()
            self._hook_exits()

    # What the script may ask

    @property
    def rank(self) -> int:
        w = self._worker
        return w.member.members.index(w.name) if w is not None and w.name in w.member.members else 0

    @property
    def world_size(self) -> int:
        return max(1, len(self._worker.member.members)) if self._worker is not None else 1

    @property
    def generation(self) -> int:
        return self._worker.member.generation if self._worker is not None else 0

    @property
    def is_main(self) -> bool:
        """Whether this worker should print, evaluate or save: rank 0, in steps that count."""
        return self.rank == 0 and not self._aside

    @property
    def rehearsing(self) -> bool:
        """A newcomer runs one step of the script before it joins; nothing of it counts."""
        return self._rehearsing

    @property
    def stepping(self) -> bool:
        """With `accumulate`: whether this micro-batch completes the step."""
        return self._step is None or self._step.part.last

    @property
    def weight(self) -> float:
        """This worker's share of the present batch."""
        return self._step.part.weight if self._step is not None and not self._aside else 0.0

    @property
    def _aside(self) -> bool:
        return self._rehearsing or (self._step is not None and self._step.kind is not StepKind.REAL)

    # Setting up

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, bucket_mib: float = 25.0
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make a model and its optimizer elastic. The same objects come back."""
        if self._model_state is not None:
            raise RuntimeError("wrap() was called twice: put all parameters into one model and one optimizer")
        self._model_state = ModelState(model, optimizer, self.state)
        original = optimizer.step

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._optimizer_step(original, *args, **kwargs)

        # Bound to the optimizer, as learning-rate schedulers expect that wrap it in turn.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        if self._worker is not None:
            self._worker.cuda = any(p.is_cuda for p in model.parameters())
            self._buckets = GradientBuckets(model, bucket_mib, complete=self._end_of_backward)
        return model, optimizer

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        lr_rule: str = "linear",
        warmup_steps: int = 20,
        accumulate: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """The training data. `batch_size` is that of all workers together; `options` go to torch's DataLoader."""
        if self._loader is not None:
            raise RuntimeError("a job has one training loader; use a plain DataLoader to evaluate")
        for name in ("sampler", "batch_sampler", "drop_last", "persistent_workers"):
            if name in options:
                raise ValueError(f"{name} cannot be given: the order of the data belongs to the job")
        rule = BatchRule(batch_size, max_batch_size, lr_rule, warmup_steps)
        self._loader = Loader(
            self,
            dataset,
            rule,
            accumulate=accumulate,
            shuffle=shuffle,
            seed=self.seed,
            num_workers=num_workers,
            collate_fn=collate_fn,
            **options,
        )
        return self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to do, wherever the job stands."""
        if count < 1:
            raise ValueError(f"epochs must be at least 1, not {count}")
        self._epochs = count
        if self._should_rehearse():
            self._rehearsing = True
            yield 0
            self._rehearsing, self._step = False, None
        self._join()
        self._in_epochs = True
        while self.position.epoch < count:
            yield self.position.epoch
            self._settle()
            self.position.epoch += 1
            self.position.cursor = 0
        self._in_epochs = False
        self._finish()

    def log(self, **values: Any) -> None:
        """Values to report (the last of each is kept): numbers, or tensors of one element."""
        if not self._aside:
            for name, value in values.items():
                self.meter.values[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def checkpoint(self, path: str | Path | None = None) -> bool:
        """Save the whole state, at rank 0, whole or not at all. False if it could not be written."""
        target = path or self.checkpoint_path
        if target is None:
            self._note("checkpoint() has nowhere to write: give it a path, or init(checkpoint=...)")
            return False
        if self._aside or self.rank != 0:
            return True
        state = self._state()
        facts = self._facts()
        try:
            write_atomically(target, lambda file: state.save(facts, file))
        except OSError as error:
            self._note(
                f"checkpoint at step {facts['position'].step} not written: {error}; the last one is kept"
            )
            return False
        self.meter.saved.append((str(target), facts["position"].step))
        self._saved_s = time.monotonic()
        return True

    # Joining

    def _should_rehearse(self) -> bool:
        if self._joined or self._worker is None or not self._rehearse or self._loader is None:
            return False
        member = self._worker.member
        self._worker.wait_for(lambda: member.first is not None)
        return not member.first

    def _state(self) -> ModelState:
        if self._model_state is None:
            raise RuntimeError("call job.wrap(model, optimizer) before training")
        return self._model_state

    def _signature(self) -> tuple[str, ...]:
        state = self._state()
        optimizer = state.optimizer
        lines = parameter_lines(list(state.model.named_parameters()), "parameter")
        lines += parameter_lines(list(state.model.named_buffers()), "buffer")
        sizes = [len(g["params"]) for g in optimizer.param_groups]
        lines.append(f"optimizer {type(optimizer).__name__} with groups of {sizes} parameters")
        return (*lines, *(self._loader.lines() if self._loader is not None else []))

    def _join(self) -> None:
        """Wait to be taken into a generation, and take the state over."""
        if self._joined:
            self._resume_alone()
            return
        worker = self._worker
        assert worker is not None
        with worker.lock:
            worker.member.ready(self._signature(), worker.receiver.address)
        worker.link.say()
        plan = worker.wait_for(lambda: worker.entering or self._offer())
        self._joined = True
        if plan.kind is Kind.FIRST:
            self._begin_first(plan)
        else:
            self._begin_switch(plan)

    def _resume_alone(self) -> None:
        """A single process outside Shoal: go on from the checkpoint if there is one."""
        fresh = self._worker is None and self.position == Position()
        if fresh and self.checkpoint_path and Path(self.checkpoint_path).exists():
            self._load(self.checkpoint_path)

    def _offer(self) -> Plan | None:
        """The plan whose holders have switched and begun to send."""
        worker = self._worker
        assert worker is not None
        plan = worker.member.plan
        if plan is None or plan.kind is not Kind.SWITCH or worker.member.formed != plan.number:
            return None
        incoming = worker.receiver.get(plan.number)
        ready = incoming is not None and any("description" in h for h in incoming.heads.values())
        return plan if ready else None

    def _begin_first(self, plan: Plan) -> None:
        worker = self._worker
        assert worker is not None
        with worker.lock:
            worker.entering, worker.interrupted = None, False
            worker.member.enter(plan)
            self._use(worker.take(plan.number), plan.members, plan.members)
        if plan.members[0] == worker.name:
            if plan.restore:
                self._load(plan.restore)
                worker.member.done = self.position.step
            self._resized()
            self._send(plan)
        else:
            incoming = worker.receiver.get(plan.number)
            found = worker.wait_for(
                lambda: worker.interrupted or (incoming and (incoming.broken or self._description(incoming)))
            )
            if isinstance(found, bytes) and incoming is not None and self._receive(plan, incoming):
                self._resized()
            else:
                self._halt(holds=False)
        worker.link.say()

    @staticmethod
    def _description(incoming: Incoming) -> bytes | None:
        return next((h["description"] for h in incoming.heads.values() if "description" in h), None)

    def _begin_switch(self, plan: Plan) -> None:
        """The holders compute the coming step; this worker looks on and receives the state meanwhile."""
        worker = self._worker
        assert worker is not None
        with worker.lock:
            incoming = worker.receiver.get(plan.number)
            if incoming is None or worker.member.plan is not plan:
                self._joined = False
                self._join()  # dropped at the last moment
                return
            description = self._description(incoming)
            assert description is not None
            facts = pickle.loads(description)
            worker.member.joined(plan, facts["position"].step)
            self._use(worker.take(plan.number), plan.members, plan.holders)
            self.position = replace(facts["position"])
            self._catching_up = (plan, incoming)
        if self._loader is not None:
            self._take_rule(facts)
            self._loader.changed()
        worker.link.say()

    def _use(self, groups: Groups, members: tuple[str, ...], contributors: tuple[str, ...]) -> None:
        old, self._groups = self._groups, groups
        self._contributors = tuple(i for i, m in enumerate(members) if m in contributors)
        self._next_contributors = tuple(range(len(members)))
        self._check_next = self._checked and len(members) > 1
        if self._worker is not None:
            self._worker.retire(old)

    def _resized(self) -> None:
        if self._loader is not None:
            note = self._loader.rule.resize(len(self._contributors), self.position.step)
            if note:
                self._note(note)
            self._loader.changed()

    def _send(self, plan: Plan) -> None:
        """Start the transfer to the newcomers; the optimizer waits for its end."""
        groups, worker = self._groups, self._worker
        assert groups is not None
        assert worker is not None
        if groups.links:
            random = random_state(worker.cuda)
            capture = self._state().capture(self._facts(random=False))
            for link in groups.links:
                link.start(plan, worker.name, self.position.step, random, capture)

    def _finish_sending(self) -> None:
        if self._groups is None or not self._groups.links:
            return
        began_s = time.perf_counter()
        for link in self._groups.links:
            while link.thread is not None and link.thread.is_alive():
                link.thread.join(0.05)
                if self._worker is not None and self._worker.interrupted:
                    link.close()
        self._groups.links.clear()
        self._pause_s += time.perf_counter() - began_s

    def _receive(self, plan: Plan, incoming: Incoming) -> bool:
        """Receive the state in place; False if it did not come whole."""
        worker = self._worker
        assert worker is not None
        with worker.lock:
            description = self._description(incoming)
            assert description is not None
            facts, homes = self._state().targets(description)
            worker.receiver.open_gate(incoming, facts, homes)
            worker.wait_for(
                lambda: (
                    incoming.broken or worker.interrupted or len(incoming.finished) == len(incoming.sources)
                )
            )
            if len(incoming.finished) < len(incoming.sources):
                return False
        self._adopt(facts, plan, incoming)
        with worker.lock:
            worker.member.state_complete(self.position.step)
        return True

    def _adopt(self, facts: dict[str, Any], plan: Plan, incoming: Incoming) -> None:
        self._state().adopt(facts)
        self.position = replace(facts["position"])
        self._take_rule(facts)
        # The random state of whoever had this rank before; where there was no one, one of its own.
        before = [h["random"] for h in incoming.heads.values() if h["rank"] == self.rank]
        if before and plan.holders:
            set_random_state(before[0])
        else:
            seed_all(hash((facts["seed"], self.position.step, self.rank)))

    def _take_rule(self, facts: dict[str, Any]) -> None:
        if self._loader is not None and facts["rule"] is not None:
            rule, mine = facts["rule"], self._loader.rule
            mine.start, mine.goal, mine.changed_at = rule.start, rule.goal, rule.changed_at

    def _facts(self, random: bool = True) -> dict[str, Any]:
        position = replace(self.position)
        if self._step is not None and self._step.stepped and self._step.kind is StepKind.REAL:
            self._advance(position)  # in the middle of the loop's body, after the optimizer's step
        return {
            "position": position,
            "rule": copy.copy(self._loader.rule) if self._loader is not None else None,
            "seed": self.seed,
            "random": random_state(self._worker is not None and self._worker.cuda) if random else None,
        }

    def _load(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                facts = self._state().load(file)
        except OSError as error:
            raise RuntimeError(f"cannot read the checkpoint {path}: {error}") from None
        self.position = replace(facts["position"])
        self._take_rule(facts)
        if facts["random"] is not None:
            set_random_state(facts["random"])
        self._note(f"went on from {path} at step {self.position.step}")

    # Steps

    def _begin_pass(self, loader: Loader) -> None:
        if loader is not self._loader:
            raise RuntimeError("this loader belongs to another job")
        if not self._in_epochs:
            self._join()
            self._settle()
            if loader.length is not None and self.position.cursor >= loader.length:
                self.position.epoch, self.position.cursor = self.position.epoch + 1, 0

    def _open_rehearsal(self) -> None:
        self._step = Step(StepKind.REHEARSAL, Part(0, 0, 0.0, True), 0, time.perf_counter())

    def _open(self, part: Part, first: bool, samples: int) -> None:
        if first:
            kind = StepKind.CATCH_UP if self._catching_up is not None else StepKind.REAL
            self._step = Step(kind, part, samples, time.perf_counter())
        else:
            assert self._step is not None
            self._step.part = part
        if self._buckets is not None:
            group = self._groups.data if self._groups is not None else None
            if group is None:
                self._buckets.disarm()
            else:
                self._buckets.arm(group, self.sync, part.weight, first, part.last)

    def _end_of_backward(self) -> None:
        """All buckets are on their way: wait for them, then vote."""
        worker, step, buckets = self._worker, self._step, self._buckets
        assert worker is not None
        assert step is not None
        assert buckets is not None
        began_s = time.perf_counter()
        buckets.disarm()
        worker.member.arrived = self.position.step + 1
        whole = True
        for work in buckets.works:  # every one: what is still under way would write into the buckets later
            whole = worker.wait(work) and whole
        if whole and step.kind is StepKind.CATCH_UP:
            assert self._catching_up is not None
            whole = self._receive(*self._catching_up)
        if whole and self._cast_vote():
            step.synced = True
            buckets.install()
        else:
            self._halt(holds=whole)
        self.meter.sync_s += time.perf_counter() - began_s

    def _cast_vote(self) -> bool:
        """One tiny all-reduce: all have the gradients; and do all have leave to switch after this step?"""
        worker, groups = self._worker, self._groups
        assert worker is not None
        assert groups is not None
        flag = worker.member.flag()
        self._vote[0], self._vote[1] = float(flag > 0), float(flag)
        if not worker.wait(groups.vote.allreduce([self._vote])):
            self._vote = torch.zeros(2)
            return False
        count, total = self._vote.tolist()
        size = len(worker.member.members)
        if flag and count == size and total == size * flag:
            with worker.lock:
                worker.member.agree()
        return True

    def _halt(self, holds: bool) -> None:
        """This generation is broken. Say how far this worker came, and go on in the one that replaces it."""
        worker, step = self._worker, self._step
        assert worker is not None
        began_s = time.perf_counter()
        if step is not None:
            step.undo = pickle.dumps(copy.deepcopy(self.state.capture()))
        with worker.lock:
            worker.interrupted = False
            worker.member.halt(holds)
        worker.link.say()
        plan = worker.wait_for(lambda: worker.entering)
        with worker.lock:
            worker.entering, worker.interrupted = None, False
            apply = worker.member.enter(plan)
            self._use(worker.take(plan.number), plan.members, plan.members)
        worker.link.say()
        self._catching_up = None
        if step is not None and apply:
            assert self._buckets is not None
            self._buckets.install()
            step.synced = step.counted = True
            step.kind = StepKind.REAL
        elif step is not None:
            step.kind = StepKind.VOID
        if self._buckets is not None and not apply:
            self._buckets.renew()
            self._buckets.restore_stats()
        self._resized()
        self.meter.pauses.append((plan.number, time.perf_counter() - began_s))

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None or step.kind is StepKind.REHEARSAL:
            return original(*args, **kwargs)
        if step.kind is StepKind.VOID:
            return None
        self._finish_sending()
        optimizer = self._state().optimizer
        factor = self._loader.rule.current(self.position.step) if self._loader is not None else 1.0
        rates = [group["lr"] for group in optimizer.param_groups]
        if factor != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        result = original(*args, **kwargs)
        if factor != 1.0:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate
        step.stepped = True
        return result

    def _settle(self) -> None:
        """The loop's body has run: the step is done, or is to be done again."""
        step, self._step = self._step, None
        if step is None:
            return
        if step.kind is StepKind.VOID:
            if step.undo is not None:
                self.state.restore(pickle.loads(step.undo))
            return
        self._finish_sending()
        self._advance(self.position)
        self._catching_up = None
        self._stepped = step.stepped
        if self._worker is not None:
            self._count(self._worker, step)
        self._contributors = self._next_contributors
        self.meter.steps += 1
        self.meter.samples += step.samples
        self.meter.busy_s += time.perf_counter() - step.began_s

    def _advance(self, position: Position) -> None:
        if self._loader is not None:
            position.cursor += self._loader.step_samples(position.cursor, self._contributors)
        position.step += 1

    def _count(self, worker: Worker, step: Step) -> None:
        with worker.lock:
            if not step.counted:
                worker.member.applied()
            if len(worker.member.members) == 1:
                worker.member.arrived = worker.member.done
                if worker.member.flag():
                    worker.member.agree()
        if self._contributors != self._next_contributors:
            # The first step of a generation that newcomers joined is done: from now on they have their part.
            self._contributors = self._next_contributors
            self._resized()
            self.meter.pauses.append((worker.member.generation, self._pause_s))
            worker.link.say()
        self._pause_s = 0.0

    def _boundary(self) -> None:
        """Between two steps, when another one is to come: the only place where members change."""
        worker = self._worker
        if self._every_s is not None and time.monotonic() - self._saved_s > self._every_s:
            self._saved_s = time.monotonic()
            self.checkpoint()
        if worker is None:
            return
        if worker.member.checkpoints > self._checkpoints:
            self._checkpoints = worker.member.checkpoints
            if self.checkpoint_path:
                self.checkpoint()
        if self._check_next and self._contributors == self._next_contributors:
            self._compare()
        if worker.interrupted:
            self._halt(holds=False)
        if worker.member.agreed and self._stepped:
            self._switch(worker)

    def _switch(self, worker: Worker) -> None:
        began_s = time.perf_counter()
        with worker.lock:
            plan = worker.member.boundary()
            if plan is None:
                return
            stays = worker.name in plan.members
            if stays:
                self._use(worker.take(plan.number), plan.members, plan.holders)
        if not stays:
            self._leave(worker, plan)
        if plan.newcomers:
            self._send(plan)
            if self._loader is not None:
                self._loader.changed()
        else:
            self._resized()
            self.meter.pauses.append((plan.number, time.perf_counter() - began_s))
        self._pause_s = time.perf_counter() - began_s
        worker.link.say()

    def _leave(self, worker: Worker, plan: Plan) -> None:
        if plan.kind is Kind.PAUSE and plan.holders[0] == worker.name:
            self._save_for_pause(worker, plan.save or self.checkpoint_path or "")
        worker.link.say_now()
        # Stay until the others have read all that was sent to them.
        with worker.lock:
            worker.lock.wait_for(lambda: worker.quit is not None, timeout=10.0)
        raise SystemExit(0)

    def _save_for_pause(self, worker: Worker, path: str) -> None:
        state, facts = self._state(), self._facts()
        error: OSError | None = None
        for place in (path, f"/dev/shm/{worker.identity.job}.{os.getpid()}.paused"):
            try:
                write_atomically(place, lambda file: state.save(facts, file))
            except OSError as failed:
                error = failed
                continue
            with worker.lock:
                worker.member.saved = place
            return
        raise RuntimeError(f"the job cannot pause: its state can be written nowhere: {error}")

    def _compare(self) -> None:
        """Checked mode: after the first step of a generation all members must be equal bit for bit."""
        self._check_next = False
        worker, groups = self._worker, self._groups
        assert worker is not None
        assert groups is not None
        mine = torch.frombuffer(bytearray(self._state().digest()), dtype=torch.uint8).to(torch.int64)
        both = torch.cat([mine, mine * mine])
        if not worker.wait(groups.vote.allreduce([both])):
            return  # broken for another reason; the next step finds out
        size = len(worker.member.members)
        total, squares = both[: len(mine)], both[len(mine) :]
        if not torch.equal(squares * size, total * total):
            raise RuntimeError(f"generation {worker.member.generation}: the members' states differ")
        self._note(f"generation {worker.member.generation}: state verified bit for bit on {size} members")

    # Reporting and ending

    def _note(self, text: str) -> None:
        log.info(text)
        self.meter.notes.append(text)

    def _where(self) -> dict[str, int]:
        position, loader = self.position, self._loader
        per_epoch = loader.steps_per_epoch() if loader is not None else 0
        rest = 0
        if loader is not None and loader.length is not None and self._epochs:
            rest = max(0, self._epochs - position.epoch - 1) * per_epoch
            batch = loader.rule.batch(len(self._contributors)) * loader.accumulate
            rest += (
                -(-max(0, loader.length - position.cursor) // batch) if position.epoch < self._epochs else 0
            )
        return {
            "step": position.step,
            "total_steps": position.step + rest if per_epoch else 0,
            "epoch": position.epoch,
            "epochs": self._epochs,
            "workers": self.world_size,
            "batch_size": loader.rule.batch(len(self._contributors)) if loader is not None else 0,
        }

    def _finish(self) -> None:
        if self._worker is not None:
            with self._worker.lock:
                self._worker.member.finish()
            self._worker.link.say_now()

    def _hook_exits(self) -> None:
        worker = self._worker
        assert worker is not None
        previous = sys.excepthook

        def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            with worker.lock:
                worker.member.fail("".join(traceback.format_exception(kind, error, trace)))
            worker.link.say_now()
            previous(kind, error, trace)

        def ended() -> None:
            phase = worker.member.phase
            if phase in (Phase.STARTING, Phase.ACTIVE):
                self._finish()
            if worker.member.phase is Phase.FINISHED and worker.link.up.is_set():
                with worker.lock:
                    worker.lock.wait_for(lambda: worker.quit is not None, timeout=10.0)

        sys.excepthook = failed
        atexit.register(ended)
