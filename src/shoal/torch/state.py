"""The state of a job: what a newcomer must receive and a checkpoint must contain."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from shoal.torch.gradients import batch_counts, parameter_lines, running_stats
from shoal.torch.packing import (
    SMALL_BYTES,
    Piece,
    alike,
    as_bytes,
    compact,
    copied,
    dumps,
    filled,
    flattened,
    lacks,
    place,
    put,
    settle,
    size_bytes,
    unfit,
    window,
)
from shoal.wire.signature import first_difference
from torch import Tensor, nn

try:
    from numpy import random as numpy_random
except ImportError:  # PyTorch runs without NumPy
    numpy_random = None  # type: ignore[assignment]  # a module or None

CHECKPOINT_VERSION = 3


class StateBox(dict[str, Any]):
    """`job.state`: what else must travel. Objects with `state_dict` keep their identity, others are replaced."""

    def capture(self) -> dict[str, Any]:
        return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in self.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        for key, value in saved.items():
            mine = self.get(key)
            if mine is not None and hasattr(mine, "load_state_dict"):
                mine.load_state_dict(value)
            else:
                self[key] = value


def random_state(cuda: bool) -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy_random is not None:
        state["numpy"] = numpy_random.get_state()
    if cuda:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if numpy_random is not None and "numpy" in state:
        numpy_random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
    random.seed(seed)


@dataclass(slots=True)
class Capture:
    """Part of the state. `large` are the live tensors: they must not change until they are sent or written."""

    description: bytes
    large: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Received:
    """A piece as it was sent: flat ranges of the parameter and of optimizer slots of its shape, and the other slots."""

    piece: Piece
    value: Tensor
    ranges: dict[str, Tensor]
    others: dict[str, Any]


ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
    *("Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD"),
)
"""torch's optimizers that update each element by itself: they can update a part of a parameter without the rest."""


class ModelState:
    """Reads and writes the state of a model and its optimizer.

    It has two parts: parameters with their optimizer state, which only the optimizer step changes and which can be
    sent in *pieces*; and a *description* of everything else (buffers, hyperparameters, `job.state`, facts).
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, box: StateBox) -> None:
        self.model, self.optimizer, self.box = model, optimizer, box
        known = {id(p) for p in model.parameters()}
        #: Parameters of the optimizer that are not of the model: those of a criterion, for example.
        self.others: list[Tensor] = [
            p for g in optimizer.param_groups for p in g["params"] if id(p) not in known
        ]
        self.parameters: list[Tensor] = [*model.parameters(), *self.others]

    def sizes(self) -> list[int]:
        """Bytes of each parameter with its optimizer state."""
        return [
            size_bytes(p)
            + sum(size_bytes(v) for v in self.optimizer.state.get(p, {}).values() if isinstance(v, Tensor))
            for p in self.parameters
        ]

    @property
    def divisible(self) -> bool:
        """Whether the optimizer updates each parameter by itself, so that it can have some before others.

        Adafactor is not: it uses the precision of the first parameter for all of them.
        """
        kind = type(self.optimizer)
        together = (torch.optim.LBFGS, torch.optim.Adafactor)
        return kind.__module__.startswith("torch.optim") and kind not in together

    def pieces(self, limit_bytes: float) -> list[tuple[Piece, int]]:
        """All parameters, cut where the optimizer allows it, with the bytes of each piece."""
        kind, result = type(self.optimizer), []
        elementwise = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
        for index, size in enumerate(self.sizes()):
            param = self.parameters[index]
            slots = [v for v in self.optimizer.state.get(param, {}).values() if isinstance(v, Tensor)]
            large = [param, *(v for v in slots if size_bytes(v) > SMALL_BYTES)]
            cut = elementwise and all(t.shape == param.shape and t.is_contiguous() for t in large)
            parts = max(1, min(param.numel(), -int(-size // limit_bytes))) if cut else 1
            edges = [param.numel() * i // parts for i in range(parts + 1)]
            result += [(Piece(index, *span), size // parts) for span in pairwise(edges)]
        return result

    def pack(self, pieces: Iterable[Piece]) -> Capture:
        large: list[Tensor] = []
        packed = []
        for piece in pieces:
            param = self.parameters[piece.index]
            slot = self.optimizer.state.get(param, {})
            ranges = {k: flattened(v)[piece.low : piece.high] for k, v in slot.items() if alike(v, param)}
            others = {k: v for k, v in slot.items() if k not in ranges}
            value = flattened(param)[piece.low : piece.high]
            packed.append((piece, place(value, large), place(ranges, large), place(others, large)))
        return Capture(dumps(packed), large)

    def unpack(self, packed: bytes) -> tuple[list[Received], list[Tensor]]:
        """The pieces to come, and the tensors into which to receive them: the live ones where that is possible."""
        homes: dict[int, Tensor] = {}
        received = []
        for piece, value, ranges, others in pickle.loads(packed):
            param = self.parameters[piece.index]
            slot = self.optimizer.state.get(param, {})
            mine = {k: window(v, piece) for k, v in slot.items() if alike(v, param)}
            received.append(
                Received(
                    piece,
                    settle(value, window(param, piece), homes),
                    settle(ranges, mine, homes),
                    settle(others, slot, homes),
                )
            )
        return received, [homes[i] for i in range(len(homes))]

    def install(self, received: Iterable[Received]) -> None:
        """Use the pieces, whose streamed tensors have been received."""
        with torch.no_grad():
            self._install(received)

    def _install(self, received: Iterable[Received]) -> None:
        # A step counter stays on the CPU unless a kernel counts; other slots are on the parameter's device.
        kernels = [g for g in self.optimizer.param_groups if g.get("fused") or g.get("capturable")]
        counting = {id(p) for g in kernels for p in g["params"]}
        for got in received:
            param = self.parameters[got.piece.index]
            put(param, got.piece, got.value)
            before = self.optimizer.state.pop(param, {})
            slot = {
                k: v.to(param.device)
                if isinstance(v, Tensor) and (k != "step" or id(param) in counting)
                else v
                for k, v in got.others.items()
            }
            for name, value in got.ranges.items():
                mine = before.get(name)
                fits = alike(mine, param) and mine.dtype == value.dtype
                slot[name] = mine if fits else torch.zeros_like(param, dtype=value.dtype)
                put(slot[name], got.piece, value)
            if slot:
                self.optimizer.state[param] = slot

    def groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group of parameters."""
        return [{k: copied(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        mine = len(self.optimizer.param_groups)
        if len(groups) != mine:
            raise RuntimeError(
                f"the optimizer has {mine} groups of parameters here, and {len(groups)} where the state comes from: "
                "add all of them before job.epochs"
            )
        for group, saved in zip(self.optimizer.param_groups, groups):
            group.update(saved)

    def describe(self, facts: dict[str, Any], whole: bool = True) -> bytes:
        """Everything but the parameters, copied now: forward changes the buffers, and the script `job.state`.

        `facts` are the job's own: position, batch rule, random state. Not `whole`: without buffers and large
        tensors of `job.state`, for a newcomer that gets a whole description later.
        """
        buffers = [compact(t) for t in self.model.buffers()] if whole else None
        box = copied(self.box.capture(), whole, compact)
        try:
            return dumps({"buffers": buffers, "groups": self.groups(), "box": box, **facts})
        except Exception as error:
            raise unfit(box) or error from None

    def adopt(self, facts: dict[str, Any]) -> None:
        """Use a description."""
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), facts["buffers"] or ()):
                buffer.copy_(value)
            self.set_groups(facts["groups"])
            own = self.box.capture()
            box = {k: filled(v, own.get(k)) for k, v in facts["box"].items()}
            self.box.restore({k: v for k, v in box.items() if not lacks(v)})

    def digest(self, facts: Any = None) -> bytes:
        """SHA-256 over parameters, batch-norm statistics, optimizer state and further facts: equal on all members.

        Other buffers and `job.state` may differ between workers (a sum of a worker's own losses, for example).
        """
        sha = hashlib.sha256()
        for tensor in (*self.parameters, *running_stats(self.model), *batch_counts(self.model)):
            sha.update(as_bytes(tensor))
        sha.update(repr((self.groups(), facts)).encode())
        for param in self.parameters:
            for key, value in sorted(self.optimizer.state.get(param, {}).items()):
                sha.update(key.encode())
                sha.update(as_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
        return sha.digest()

    def save(self, facts: dict[str, Any], file: io.BufferedIOBase) -> None:
        all_pieces = self.pack(piece for piece, _ in self.pieces(math.inf))
        saved = {
            "shoal": CHECKPOINT_VERSION,
            "signature": self.signature(),
            "facts": self.describe(facts),
            "pieces": all_pieces.description,
            "large": all_pieces.large,
        }
        torch.save(saved, file)

    def signature(self) -> tuple[str, ...]:
        """Two states are compatible if these lines are equal."""
        lines = parameter_lines(list(self.model.named_parameters()), "parameter")
        lines += parameter_lines(
            [(str(i), p) for i, p in enumerate(self.others)], "the optimizer's own parameter"
        )
        lines += parameter_lines(list(self.model.named_buffers()), "buffer")
        sizes = [len(g["params"]) for g in self.optimizer.param_groups]
        return *lines, f"optimizer {type(self.optimizer).__name__} with groups of {sizes} parameters"

    def load(self, file: io.BufferedIOBase) -> dict[str, Any]:
        try:
            saved = torch.load(file, weights_only=False, map_location="cpu")
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
            raise ValueError(f"it is damaged, or not a checkpoint ({type(error).__name__})") from None
        if not isinstance(saved, dict) or saved.get("shoal") != CHECKPOINT_VERSION:
            raise ValueError("it is not a checkpoint of this version of Shoal")
        difference = first_difference(saved["signature"], self.signature(), "it", "this script")
        if difference is not None:
            raise ValueError(difference)
        received, homes = self.unpack(saved["pieces"])
        with torch.no_grad():
            for home, value in zip(homes, saved["large"]):
                home.copy_(value)
        self.install(received)
        facts: dict[str, Any] = pickle.loads(saved["facts"])
        self.adopt(facts)
        return facts
