"""The state of a job: what a newcomer must receive and a checkpoint must contain."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, Any

from torch.optim.lr_scheduler import LRScheduler

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
from shoal.wire.previous import CHECKPOINT_VERSION, READABLE_CHECKPOINTS
from shoal.wire.signature import first_difference
from torch import Tensor, nn

try:
    from numpy import random as numpy_random
except ImportError:  # PyTorch runs without NumPy
    numpy_random = None  # type: ignore[assignment]  # a module or None

OWN = "shoal:"
"""Begins the names of the runtime's own entries among those that travel."""


class StateBox(dict[str, Any]):
    """`job.state`: what else must travel. Objects with `state_dict` keep their identity, others are replaced."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        #: What the runtime itself lets travel: the schedulers of `job.wrap`, for example.
        self.own: dict[str, Any] = {}

    def capture(self) -> dict[str, Any]:
        everything = {**self, **{OWN + name: value for name, value in self.own.items()}}
        return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in everything.items()}

    def capture_small(self) -> dict[str, Any]:
        """Schedulers and plain values: what a script changes in a step, and what is copied in no time."""
        everything = {**self, **{OWN + name: value for name, value in self.own.items()}}
        small = {k: v for k, v in everything.items() if isinstance(v, (bool, int, float, str))}
        schedulers = {k: v.state_dict() for k, v in everything.items() if isinstance(v, LRScheduler)}
        return small | schedulers

    def quick_hash(self) -> int:
        """Of the script's plain values, alone or in small collections: it is computed in every step."""
        if not self:
            return 0
        plain = {k: _plain(v) for k, v in self.items()}
        return zlib.crc32(repr({k: v for k, v in sorted(plain.items()) if v is not None}).encode())

    def restore(self, saved: dict[str, Any]) -> None:
        for key, value in saved.items():
            home, name = (self.own, key.removeprefix(OWN)) if key.startswith(OWN) else (self, key)
            mine = home.get(name)
            if mine is not None and hasattr(mine, "load_state_dict"):
                mine.load_state_dict(value)
            else:
                home[name] = value


MOST_PLAIN = 64
"""Elements of a collection that is compared in every step."""


def _plain(value: Any) -> Any:
    """Numbers and strings, or a small collection of them. None for everything else."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    if isinstance(value, dict) and len(value) <= MOST_PLAIN:
        return sorted((repr(k), _plain(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)) and len(value) <= MOST_PLAIN:
        return [_plain(v) for v in value]
    return None


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


def _of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


class ModelState:
    """Reads and writes the state of models and their optimizers.

    It has two parts: parameters with their optimizer state, which only the optimizer step changes and which can be
    sent in *pieces*; and a *description* of everything else (buffers, hyperparameters, `job.state`, facts).
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], box: StateBox
    ) -> None:
        #: The model, or all of them as one.
        self.model: nn.Module = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.optimizers, self.box = tuple(optimizers), box
        known = {id(p) for p in self.model.parameters()}
        #: Parameters of an optimizer that are not of a model: those of a criterion, for example.
        self.others: list[Tensor] = []
        self._owner: dict[int, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            for param in (p for g in optimizer.param_groups for p in g["params"]):
                if id(param) in self._owner:
                    raise ValueError("a parameter is in two optimizers: give each parameter to one of them")
                self._owner[id(param)] = optimizer
                if id(param) not in known:
                    self.others.append(param)
        self.parameters: list[Tensor] = [*self.model.parameters(), *self.others]
        self._trainable = [i for i, p in enumerate(self.parameters) if p.requires_grad]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters as the optimizer knows them, in the same order."""
        return self.parameters

    def slots(self, param: Tensor) -> dict[str, Any]:
        """The optimizer state of a parameter."""
        owner = self._owner.get(id(param))
        found: dict[str, Any] = owner.state.get(param, {}) if owner is not None else {}
        return found

    def _set_slots(self, param: Tensor, slots: dict[str, Any]) -> None:
        owner = self._owner.get(id(param))
        if owner is not None:
            owner.state.pop(param, None)
            if slots:
                owner.state[param] = slots

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def sizes(self) -> list[int]:
        """Bytes of each parameter with its optimizer state."""
        return [
            size_bytes(p) + sum(size_bytes(v) for v in self.slots(p).values() if isinstance(v, Tensor))
            for p in self.parameters
        ]

    @property
    def divisible(self) -> bool:
        """Whether the optimizers update each parameter by itself, so that they can have some before others.

        Adafactor does not: it uses the precision of the first parameter for all of them.
        """
        together = (torch.optim.LBFGS, torch.optim.Adafactor)
        return all(_of_torch(o) and type(o) not in together for o in self.optimizers)

    @property
    def elementwise(self) -> bool:
        """Whether the optimizers update each element by itself."""
        return all(_of_torch(o) and type(o).__name__ in ELEMENTWISE for o in self.optimizers)

    def pieces(self, limit_bytes: float) -> list[tuple[Piece, int]]:
        """All parameters, cut where the optimizer allows it, with the bytes of each piece."""
        result = []
        for index, size in enumerate(self.sizes()):
            param = self.parameters[index]
            slots = [v for v in self.slots(param).values() if isinstance(v, Tensor)]
            large = [param, *(v for v in slots if size_bytes(v) > SMALL_BYTES)]
            cut = self.elementwise and all(t.shape == param.shape and t.is_contiguous() for t in large)
            parts = max(1, min(param.numel(), -int(-size // limit_bytes))) if cut else 1
            edges = [param.numel() * i // parts for i in range(parts + 1)]
            result += [(Piece(index, *span), size // parts) for span in pairwise(edges)]
        return result

    def pack(self, pieces: Iterable[Piece]) -> Capture:
        large: list[Tensor] = []
        packed = []
        for piece in pieces:
            param = self.parameters[piece.index]
            slot = self.slots(param)
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
            slot = self.slots(param)
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
        kernels = [g for g in self._groups if g.get("fused") or g.get("capturable")]
        counting = {id(p) for g in kernels for p in g["params"]}
        for got in received:
            param = self.parameters[got.piece.index]
            put(param, got.piece, got.value)
            before = self.slots(param)
            slot = {
                k: v.to(param.device)
                if isinstance(v, Tensor) and (k != "step" or id(param) in counting)
                else v
                for k, v in got.others.items()
            }
            for name, value in got.ranges.items():
                mine = before.get(name)
                if mine is None or not alike(mine, param) or mine.dtype != value.dtype:
                    mine = torch.zeros_like(param, dtype=value.dtype)
                slot[name] = mine
                put(slot[name], got.piece, value)
            self._set_slots(param, slot)

    def rates(self) -> tuple[float, ...]:
        """The learning rates."""
        return tuple(g["lr"] for g in self._groups if isinstance(g.get("lr"), float))

    def groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group of parameters."""
        return [{k: copied(v) for k, v in g.items() if k != "params"} for g in self._groups]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        mine = self._groups
        if len(groups) != len(mine):
            raise RuntimeError(
                f"the optimizer has {len(mine)} groups of parameters here, and {len(groups)} where the state comes "
                "from: add all of them before job.wrap"
            )
        for group, saved in zip(mine, groups):
            group.update(saved)

    def names(self) -> list[str]:
        """Of the parameters, in the same order."""
        own = (f"the optimizer's own parameter {i}" for i in range(len(self.others)))
        return [*(f"parameter {name}" for name, _ in self.model.named_parameters()), *own]

    def frozen(self) -> list[int]:
        """Parameters that were to be trained at first, and which the script has frozen since."""
        return [i for i in self._trainable if not self.parameters[i].requires_grad]

    def describe(self, facts: dict[str, Any], whole: bool = True) -> bytes:
        """Everything but the parameters, copied now: forward changes the buffers, and the script `job.state`.

        `facts` are the job's own: position, batch rule, random state. Not `whole`: without buffers and large
        tensors of `job.state`, for a newcomer that gets a whole description later.
        """
        buffers = [compact(t) for t in self.model.buffers()] if whole else None
        box = copied(self.box.capture(), whole, compact)
        try:
            return dumps(
                {"buffers": buffers, "groups": self.groups(), "frozen": self.frozen(), "box": box, **facts}
            )
        except Exception as error:
            raise unfit(box) or error from None

    def adopt(self, facts: dict[str, Any]) -> None:
        """Use a description."""
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), facts["buffers"] or ()):
                buffer.copy_(value)
            self.set_groups(facts["groups"])
            for index in self._trainable if "frozen" in facts else ():  # an older checkpoint lacks it
                self.parameters[index].requires_grad_(index not in facts["frozen"])
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
            for key, value in sorted(self.slots(param).items()):
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
        for optimizer in self.optimizers:
            sizes = [len(g["params"]) for g in optimizer.param_groups]
            lines.append(f"optimizer {type(optimizer).__name__} with groups of {sizes} parameters")
        return tuple(lines)

    def load(self, file: IO[bytes]) -> dict[str, Any]:
        saved = self.read(file)
        received, homes = self.unpack(saved["pieces"])
        with torch.no_grad():
            for home, value in zip(homes, saved["large"]):
                home.copy_(value)
        self.install(received)
        facts: dict[str, Any] = pickle.loads(saved["facts"])
        self.adopt(facts)
        return facts

    def read(self, file: IO[bytes]) -> dict[str, Any]:
        """What `save` has written, if it fits this script's model."""
        try:
            saved = torch.load(file, weights_only=True, map_location="cpu")
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
            raise ValueError(f"it is damaged, or not a checkpoint ({type(error).__name__})") from None
        if not isinstance(saved, dict) or saved.get("shoal") not in READABLE_CHECKPOINTS:
            raise ValueError("it is not a checkpoint of this version of Shoal")
        difference = first_difference(saved["signature"], self.signature(), "it", "this script")
        if difference is not None:
            raise ValueError(difference)
        return dict(saved)
