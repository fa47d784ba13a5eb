"""All that makes a job's state: what a newcomer must be given and a checkpoint must hold."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import torch
from shoal.torch.gradients import running_stats
from torch import Tensor, nn

SMALL_BYTES = 4096
"""Tensors up to this size travel with the description; larger ones are streamed from where they are."""


class StateBox(dict[str, Any]):
    """`job.state`: whatever else must travel. Things with `state_dict` keep their identity, others are replaced."""

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
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if cuda:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@dataclass(slots=True)
class Capture:
    """The state at one step boundary. `large` are the live tensors: they must not change until they are sent."""

    description: bytes
    large: list[Tensor] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.large)


class ModelState:
    """Reads and writes the state of a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, box: StateBox) -> None:
        self.model, self.optimizer, self.box = model, optimizer, box
        self._params = [p for g in optimizer.param_groups for p in g["params"]]

    def capture(self, facts: dict[str, Any], copy_small: bool = True) -> Capture:
        """`facts` are the job's own: position, batch rule, random state."""
        large: list[Tensor] = []

        def place(value: Any, movable: bool = False) -> Any:
            if isinstance(value, Tensor) and movable and value.numel() * value.element_size() > SMALL_BYTES:
                large.append(value.detach())
                return _Streamed(tuple(value.shape), value.dtype, len(large) - 1)
            if isinstance(value, Tensor):
                return value.detach().cpu().clone() if copy_small else value.detach().cpu()
            if isinstance(value, dict):
                return {k: place(v, movable) for k, v in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(place(v, movable) for v in value)
            return value

        tensors = [place(t, movable=True) for t in self.model.parameters()]
        # Forward changes the buffers, and user code what is in the box: they are copied at the boundary.
        buffers = [place(t) for t in self.model.buffers()]
        slots = [place(dict(self.optimizer.state.get(p, {})), movable=True) for p in self._params]
        groups = [{k: place(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        box = place(self.box.capture())
        body = pickle.dumps(
            {"parameters": tensors, "buffers": buffers, "slots": slots, "groups": groups, "box": box, **facts}
        )
        return Capture(body, large)

    def targets(self, description: bytes) -> tuple[dict[str, Any], list[Tensor]]:
        """Where the streamed tensors shall go: the parameters themselves, and optimizer slots, made if missing."""
        facts = pickle.loads(description)
        large: dict[int, Tensor] = {}

        def settle(value: Any, mine: Any, device: torch.device | str = "cpu") -> Any:
            if isinstance(value, _Streamed):
                fits = (
                    isinstance(mine, Tensor)
                    and tuple(mine.shape) == value.shape
                    and mine.dtype == value.dtype
                )
                home = mine.detach() if fits else torch.empty(value.shape, dtype=value.dtype, device=device)
                large[value.index] = home
                return home
            if isinstance(value, dict):
                known = mine if isinstance(mine, dict) else {}
                return {k: settle(v, known.get(k), device) for k, v in value.items()}
            return value

        facts["parameters"] = [
            settle(v, p.detach()) for v, p in zip(facts["parameters"], self.model.parameters())
        ]
        facts["slots"] = [
            settle(slot, dict(self.optimizer.state.get(p, {})), p.device)
            for slot, p in zip(facts["slots"], self._params)
        ]
        return facts, [large[i] for i in range(len(large))]

    @torch.no_grad()
    def adopt(self, facts: dict[str, Any]) -> None:
        """The streamed tensors are in place: take the rest."""
        for mine, value in zip(self.model.parameters(), facts["parameters"]):
            if mine.data_ptr() != value.data_ptr():
                mine.copy_(value)
        for mine, value in zip(self.model.buffers(), facts["buffers"]):
            mine.copy_(value)
        self.optimizer.state.clear()
        for param, slot in zip(self._params, facts["slots"]):
            if slot:
                # Adam's step counter stays on the CPU; all else lives with its parameter.
                self.optimizer.state[param] = {
                    k: v.to(param.device) if isinstance(v, Tensor) and k != "step" else v
                    for k, v in slot.items()
                }
        for group, saved in zip(self.optimizer.param_groups, facts["groups"]):
            group.update(saved)
        self.box.restore(facts["box"])

    def digest(self) -> bytes:
        """SHA-256 over parameters, batch-norm statistics and optimizer state: equal on all members, bit for bit."""
        sha = hashlib.sha256()
        for tensor in (*self.model.parameters(), *running_stats(self.model)):
            sha.update(as_bytes(tensor))
        for param in self._params:
            for key, value in sorted(self.optimizer.state.get(param, {}).items()):
                sha.update(key.encode())
                sha.update(as_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
        return sha.digest()

    def save(self, facts: dict[str, Any], file: io.BufferedIOBase) -> None:
        capture = self.capture(facts, copy_small=False)
        torch.save({"shoal": 1, "description": capture.description, "large": capture.large}, file)

    def load(self, file: io.BufferedIOBase) -> dict[str, Any]:
        saved = torch.load(file, weights_only=False, map_location="cpu")
        if not isinstance(saved, dict) or saved.get("shoal") != 1:
            raise ValueError("this is not a checkpoint of Shoal")
        facts, homes = self.targets(saved["description"])
        with torch.no_grad():
            for home, value in zip(homes, saved["large"]):
                home.copy_(value)
        self.adopt(facts)
        return facts


@dataclass(frozen=True, slots=True)
class _Streamed:
    """In a description: the place of a tensor that is streamed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes; without a copy if it is contiguous in host memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
