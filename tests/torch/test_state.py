"""State in pieces: whatever is sent when, the newcomer ends up equal, bit for bit."""

from __future__ import annotations

import io
import pickle
import random

import pytest

import torch
from shoal.torch.packing import as_bytes, dumps
from shoal.torch.receiver import Incoming
from shoal.torch.receiving import received_only
from shoal.torch.state import ModelState, StateBox
from shoal.wire.messages import Kind, Plan
from torch import nn

PLAN = Plan(2, Kind.SWITCH, ("w0", "w1"), 1, ("w0",))


class Zoo(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = nn.Parameter(torch.randn(90, 40))
        self.brain = nn.Parameter(torch.randn(40, 30, dtype=torch.bfloat16))
        self.precise = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.turning = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 5))
        self.frozen = nn.Parameter(torch.randn(60, 30), requires_grad=False)
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.twin = self.conv
        self.late = nn.Parameter(torch.randn(50, 50))  # gets no gradient in the first steps
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("flags", torch.randn(5000) > 0)
        self.register_buffer("across", torch.randn(30, 20).t())
        self.register_buffer("nothing", torch.zeros(0, dtype=torch.int64))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
}
NO_COMPLEX = ("nadam", "radam", "rprop", "adafactor")


class Side:
    """A holder, or a newcomer that has rehearsed a step."""

    def __init__(self, optimizer: str, seed: int) -> None:
        self.model = Zoo(seed)
        if optimizer in NO_COMPLEX:
            self.model.turning.requires_grad_(False)
            self.model.empty.requires_grad_(False)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](params)
        self.box = StateBox(count=seed, average=torch.randn(2000))
        self.state = ModelState([self.model], [self.optimizer], self.box)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for name, p in self.model.named_parameters():
            p.grad = None
            if p.requires_grad and (name != "late" or step > 2):
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def stream(holder: Side, newcomer: Side, choose: random.Random, limit_bytes: float) -> int:
    """Send pieces in windows of random size, with a step after each. Returns the number of windows."""
    incoming = Incoming(PLAN, ("w0",))
    rest = [piece for piece, _ in holder.state.pieces(limit_bytes)]
    choose.shuffle(rest)
    windows = 0
    while rest:
        taken = choose.randint(0, len(rest)) if holder.state.divisible else len(rest)
        now, rest = rest[:taken], rest[taken:]
        capture = holder.state.pack(now)
        received, homes = newcomer.state.unpack(capture.description)
        for home, value in zip(homes, capture.large):
            as_bytes(home)[:] = as_bytes(value)
        incoming.arrived += [(windows, got) for got in received]
        newcomer.state.install(incoming.take(windows))
        windows += 1
        for side in (holder, newcomer):
            side.set_gradients(step=windows)
        holder.optimizer.step()
        with received_only(newcomer.state, incoming.have):
            newcomer.optimizer.step()
    newcomer.state.adopt(pickle.loads(holder.state.describe({})))
    assert all(incoming.have.get(i) == p.numel() for i, p in enumerate(newcomer.state.parameters))
    return windows


def content(side: Side) -> dict[str, object]:
    tensors = {**dict(side.model.named_parameters()), **dict(side.model.named_buffers())}
    held = {name: (t.dtype, t.shape, bytes(as_bytes(t))) for name, t in tensors.items()}
    for name, p in side.model.named_parameters():
        for slot, value in side.optimizer.state.get(p, {}).items():
            held[f"{name} {slot}"] = bytes(as_bytes(value)) if isinstance(value, torch.Tensor) else value
    return {**held, "box": side.box["count"], "average": side.box["average"].tolist()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pieces_sent_over_many_steps_in_any_order_make_an_equal_newcomer(optimizer: str):
    windows = []
    for seed in range(4):
        holder, newcomer = Side(optimizer, seed=1), Side(optimizer, seed=2)
        choose = random.Random(seed)
        begun = choose.randint(0, 3)
        for step in range(begun):  # with and without optimizer state
            holder.set_gradients(-step - 1 if step else 5)
            holder.optimizer.step()
        newcomer.set_gradients(9)
        newcomer.optimizer.step()
        windows.append(stream(holder, newcomer, choose, limit_bytes=4096))
        want, have = content(holder), content(newcomer)
        assert have.keys() == want.keys()
        assert [name for name in want if want[name] != have[name]] == []
    assert (max(windows) > 3) == holder.state.divisible


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_a_checkpoint_holds_the_same(optimizer: str):
    saved, loaded = Side(optimizer, seed=1), Side(optimizer, seed=2)
    for step in (1, 5):
        saved.set_gradients(step)
        saved.optimizer.step()
    file = io.BytesIO()
    saved.state.save({}, file)
    file.seek(0)
    loaded.state.load(file)
    assert content(loaded) == content(saved)


def test_what_was_frozen_during_the_training_travels_and_what_was_frozen_before_does_not():
    holder, newcomer = Side("sgd", 0), Side("sgd", 1)
    holder.model.large.requires_grad_(False)
    newcomer.model.brain.requires_grad_(False)
    newcomer.state.adopt(pickle.loads(holder.state.describe({})))
    assert not newcomer.model.large.requires_grad
    assert newcomer.model.brain.requires_grad
    assert not newcomer.model.frozen.requires_grad

    second = Zoo(
        2
    )  # another stage of the training begins from the first one's state, with other layers frozen
    second.frozen.requires_grad_(True)
    second.late.requires_grad_(False)
    stage = ModelState([second], [torch.optim.SGD(second.parameters(), lr=0.1)], StateBox())
    stage.adopt(pickle.loads(Side("sgd", 0).state.describe({})))
    assert second.frozen.requires_grad
    assert not second.late.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        *Zoo(1).state_dict().values(),
        torch.randn(3, requires_grad=True),
        torch.randn(2, 3).t(),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_a_tensor_travels_as_it_is(tensor: torch.Tensor):
    back = pickle.loads(dumps({"here": [tensor]}))["here"][0]
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if back.layout is torch.strided:
        assert back.stride() == tensor.stride()
        with torch.no_grad():
            back.zero_()  # its memory is writable


def test_what_cannot_travel_in_the_jobs_state_is_named():
    side = Side("sgd", 0)
    side.box["rule"] = lambda x: x
    with pytest.raises(RuntimeError, match=r"job.state\['rule'\] cannot travel"):
        side.state.describe({}, whole=False)


def test_groups_of_parameters_that_were_added_later_are_named():
    holder, newcomer = Side("sgd", 0), Side("sgd", 1)
    holder.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="has 1 groups of parameters here, and 2 where"):
        newcomer.state.adopt(pickle.loads(holder.state.describe({})))


def test_a_description_carries_a_view_without_the_rest_of_its_memory():
    side = Side("sgd", 0)
    side.box["average"] = torch.zeros(1_000_000)[:10]
    assert len(side.state.describe({})) < 100_000
