"""What all parts of a job share: where it stands, what it holds, and how that is saved."""

from __future__ import annotations

import copy
import logging
import os
import time
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from shoal.torch.gradients import GradientBuckets, Sync, all_reduce
from shoal.torch.loader import Loader
from shoal.torch.meter import Meter
from shoal.torch.order import Part, Position
from shoal.torch.receiving import Incoming
from shoal.torch.state import ModelState, StateBox, random_state, set_random_state
from shoal.torch.worker import Groups, Identity, Worker

log = logging.getLogger("shoal.torch")


class StepKind(Enum):
    REAL = auto()
    REHEARSAL = auto()  # before joining: nothing of it counts
    CATCH_UP = (
        auto()
    )  # a newcomer looks on: it adds nothing, receives state, and applies the others' gradients
    VOID = auto()  # the synchronisation broke: the rest of the loop's body runs, but the step is done again


@dataclass(slots=True)
class Step:
    kind: StepKind
    part: Part
    samples: int  # of this worker
    began_s: float
    size: int = 0  # samples of all workers: by this the job gets on, whoever is a member when the step ends
    synced: bool = False
    stepped: bool = False
    counted: bool = False
    resized: bool = False  # the members changed within it: batch and learning rate follow after it
    undo: bytes | None = None


def advance(position: Position, step: Step) -> None:
    position.cursor += step.size
    position.step += 1


class JobCore:
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
        self._least = 1  # samples of a part
        self._step: Step | None = None
        self._joined = identity is None
        self._rehearsing = False
        self._in_epochs = False
        self._catching_up: Incoming | None = None  # the state is still coming to this worker
        self._retreated = False  # its generation broke before it had the whole state; it is to join anew
        self._looking_on = 0  # the generation in whose coming step this worker takes part with nothing
        self._looked_flag = 0
        self._looking: Any = None
        self._final = False  # after this step all newcomers have their part
        self._next_final = False
        self._window_step = 0
        self._groups: Groups | None = None
        self._former: Groups | None = None  # of the holders alone, as long as newcomers look on
        self._contributors: tuple[int, ...] = (0,)
        self._next_contributors: tuple[int, ...] = (0,)
        self._check_next = False
        self._check_after = -1  # the step that all members must have done before
        self._stepped = True
        self._pause_s = 0.0
        self._vote = torch.zeros(1, dtype=torch.int64)
        self._checkpoints = 0
        self._worker = Worker(identity, self.meter, self._where) if identity else None

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
    def rehearsing(self) -> bool:
        """A newcomer runs one step of the script before it joins; nothing of it counts."""
        return self._rehearsing

    @property
    def _aside(self) -> bool:
        real = self._step is None or self._step.kind is StepKind.REAL
        return self._rehearsing or self._retreated or not real

    @property
    def _growing(self) -> bool:
        """Newcomers look on; they have no part of the batch yet."""
        return self._contributors != self._next_contributors

    def _state(self) -> ModelState:
        if self._model_state is None:
            raise RuntimeError("call job.wrap(model, optimizer) before training")
        return self._model_state

    def _set_away(self, away: bool) -> bool:
        """Tell whether the script is elsewhere than in its steps, where it may take its time; what it was before."""
        if self._worker is None:
            return away
        before, self._worker.member.away = self._worker.member.away, away
        if away != before:
            self._worker.link.say()
        return before

    def _note(self, text: str) -> None:
        log.info(text)
        self.meter.notes.append(text)

    def _facts(self, random: bool = True) -> dict[str, Any]:
        position = replace(self.position)
        if self._step is not None and self._step.stepped and self._step.kind is StepKind.REAL:
            advance(position, self._step)  # in the middle of the loop's body, after the optimizer's step
        return {
            "position": position,
            "rule": copy.copy(self._loader.rule) if self._loader is not None else None,
            "seed": self.seed,
            "samples": self._loader.length if self._loader is not None else None,
            "random": random_state(self._worker is not None and self._worker.cuda) if random else None,
        }

    def _take_rule(self, facts: dict[str, Any]) -> None:
        if self._loader is not None and facts["rule"] is not None:
            rule, mine = facts["rule"], self._loader.rule
            mine.start, mine.goal, mine.changed_at = rule.start, rule.goal, rule.changed_at

    def _load(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                facts = self._state().load(file)
        except OSError as error:
            raise RuntimeError(f"cannot read the checkpoint {path}: {error}") from None
        except ValueError as error:
            raise RuntimeError(f"cannot go on from the checkpoint {path}: {error}") from None
        self.position = replace(facts["position"])
        self._check_place(path, facts["samples"])
        self._take_rule(facts)
        if facts["random"] is not None:
            set_random_state(facts["random"])
        self._note(f"went on from {path} at step {self.position.step}")

    def _check_place(self, path: str, samples: int | None) -> None:
        """A place within an epoch means nothing in other data."""
        length = self._loader.length if self._loader is not None else None
        position = self.position
        if samples is None or length is None or samples == length or position.cursor == 0:
            return
        if position.cursor < samples:
            raise RuntimeError(
                f"cannot go on from the checkpoint {path} within epoch {position.epoch}: "
                f"the data set had {samples} samples and has {length} now"
            )
        position.epoch, position.cursor = position.epoch + 1, 0

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
