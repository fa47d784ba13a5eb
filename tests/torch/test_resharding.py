"""The arithmetic of sharded rows, and moving them between workers of one process."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch
from shoal.torch.sharding import private
from shoal.torch.sharding.moving import Change, Rows, move
from shoal.torch.sharding.private import Collectives
from shoal.torch.sharding.reshard import moved_rows, overlaps, part_rows, span
from shoal.torch.sharding.setup import shard
from shoal.torch.sharding.shards import Shards
from torch import nn

workers = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True).map(tuple)
rows = st.integers(0, 60)


@given(rows, st.integers(1, 9))
def test_spans_are_those_of_torch(rows: int, size: int):
    parts = torch.arange(rows).chunk(size) if rows else ()
    for index in range(size):
        want = parts[index].tolist() if index < len(parts) else []
        assert list(range(*span(rows, size, index))) == want


@given(rows, workers, workers)
def test_every_row_goes_from_its_old_owner_to_its_new_one_once(rows: int, old: tuple, new: tuple):
    found = overlaps(rows, old, new)
    assert [r for o in found for r in range(o.low, o.high)] == list(range(rows))
    for o in found:
        assert o.low < o.high
        for workers, name in ((old, o.source), (new, o.target)):
            low, high = span(rows, len(workers), workers.index(name))
            assert low <= o.low
            assert o.high <= high


@given(rows, workers)
def test_nothing_moves_if_nothing_changes(rows: int, same: tuple):
    assert moved_rows(rows, same, same) == 0


@given(rows, workers, workers)
def test_only_rows_whose_owner_changes_move(rows: int, old: tuple, new: tuple):
    def owner(workers: tuple, row: int) -> str:
        return workers[row // part_rows(rows, len(workers))]

    assert moved_rows(rows, old, new) == sum(owner(old, r) != owner(new, r) for r in range(rows))


class Mail:
    """An exchange among workers of one process: each worker's parts are known before any is read."""

    def __init__(self, peers: tuple) -> None:
        self.peers, self.sent = peers, {}

    def send(self, me: str):
        def exchange(flat, sent_sizes, sizes):
            self.sent[me] = dict(zip(self.peers, flat.split(sent_sizes)))
            raise StopIteration

        return exchange

    def receive(self, me: str):
        def exchange(flat, sent_sizes, sizes):
            parts = [self.sent[p][me] if p in self.sent else flat[:0] for p in self.peers]
            assert [p.numel() for p in parts] == sizes
            return torch.cat(parts)

        return exchange


@given(st.lists(st.tuples(rows, st.integers(1, 3)), min_size=1, max_size=4), workers, workers)
def test_moved_rows_are_the_same_bits(shapes: list, old: tuple, new: tuple):
    generator = torch.Generator().manual_seed(1)
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    full = [torch.randn(s, generator=generator).to(kinds[i % 3]) for i, s in enumerate(shapes)]
    peers = tuple(dict.fromkeys((*old, *new)))
    mail = Mail(peers)

    def rows_of(me: str) -> list[Rows]:
        found = []
        for tensor in full:
            low, high = span(len(tensor), len(old), old.index(me)) if me in old else (0, 0)
            held = [(low, tensor[low:high])] if me in old else []
            found.append(Rows(tuple(tensor.shape), tensor.dtype, tensor.device, held))
        return found

    for me in peers:
        with contextlib.suppress(StopIteration):
            move(rows_of(me), Change(old, new, peers, me), mail.send(me))
    for me in peers:
        got = move(rows_of(me), Change(old, new, peers, me), mail.receive(me))
        for tensor, padded in zip(full, got):
            if me not in new:
                assert padded is None
                continue
            low, high = span(len(tensor), len(new), new.index(me))
            assert len(padded) == part_rows(len(tensor), len(new))
            assert torch.equal(padded[: high - low], tensor[low:high])
            assert not padded[high - low :].any()


class Recorded(Collectives):
    """What a worker sends in each exchange, if the others send it nothing."""

    def __init__(self) -> None:
        super().__init__(None, lambda work: True)
        self.sent_bytes: list[int] = []

    def exchange(self, sent, sent_sizes, sizes):
        self.sent_bytes.append(sent.numel())
        return sent.new_empty(0)


def test_a_layer_at_a_time_is_moved_and_only_rows_whose_owner_changes():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    alone = Collectives(None, lambda work: True)
    mesh = private.make_mesh(alone, "cpu")
    try:
        shard(model, optimizer, mesh, nn.Linear, {})
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        shards, moving = Shards(model, optimizer, "a", mesh, alone), Recorded()
        assert shards.change(("a", "b"), moving, ("a", "b"), alone)
        mesh = shards.mesh
        # Half of the rows of each layer, with the two states of AdamW, in one exchange.
        assert moving.sent_bytes == [3 * 4 * 8 * 4] * 3 + [3 * 1 * 8 * 4]
        assert [s.local.shape[0] for s in shards.all()] == [4, 4, 4, 1]
        assert shards.change(("a", "b"), moving, ("a", "b"), alone)
        assert len(moving.sent_bytes) == 4, "nothing moves if nothing changes"
    finally:
        private.forget(shards.mesh)


class Zeros(Collectives):
    """The other workers send zeros."""

    def __init__(self) -> None:
        super().__init__(None, lambda work: True)

    def exchange(self, sent, sent_sizes, sizes):
        return sent.new_zeros(sum(sizes))


def bytes_of_tensors(events: list, name: str) -> tuple[int, int, int]:
    """Those allocated when the part of this name began, the most meanwhile, and at its end."""
    part = next(e for e in events if e.name() == name)
    begin_ns, end_ns = part.start_ns(), part.start_ns() + part.duration_ns()
    now = before = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        if event.start_ns() > end_ns:
            break
        now += event.nbytes()
        if event.start_ns() < begin_ns:
            before = peak = now
        peak = max(peak, now)
    return before, peak, now


def test_moving_the_rows_needs_the_memory_of_one_layer_above_the_model():
    side, count = 128, 8
    layer_bytes = 3 * side * side * 4  # with the two states of AdamW
    alone = Collectives(None, lambda work: True)
    mesh = private.make_mesh(alone, "cpu")
    record = torch.profiler.record_function
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(count)))
            optimizer = torch.optim.AdamW(model.parameters())
            shard(model, optimizer, mesh, nn.Linear, {})
            model(torch.ones(1, side)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            shards = Shards(model, optimizer, "a", mesh, alone)
            with record("shrink"):
                assert shards.change(("a", "b"), Zeros(), ("a", "b"), alone)
            with record("grow"):
                assert shards.change(("a",), Zeros(), ("a", "b"), alone)
    finally:
        private.forget(shards.mesh)
    events = list(profile.profiler.kineto_results.events())
    for name, change_layers in (("shrink", -count / 2), ("grow", count / 2)):
        before, peak, after = bytes_of_tensors(events, name)
        assert (after - before) / layer_bytes == pytest.approx(change_layers, abs=0.1)
        above = (peak - max(before, after)) / layer_bytes
        assert 0.1 < above < 1.1, f"{name}: {above:.2f} layers above the model"
