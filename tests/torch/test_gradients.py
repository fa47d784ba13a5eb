"""Gradient buckets by themselves, with a group that is only made believe."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from shoal.torch.gradients import GradientBuckets
from torch import nn


class Done:
    def wait(self, timeout=None) -> bool:
        return True


def nothing_from_others(group, flat):
    return Done()


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, left: bool):
        return (self.left if left else self.right)(x)


def armed(model: nn.Module, weight: float = 1.0) -> GradientBuckets:
    buckets = GradientBuckets(model)
    buckets.arm(None, nothing_from_others, weight, first=True, last=True)
    return buckets


def test_a_worker_without_a_part_keeps_no_gradient_of_its_own():
    model = Branches()
    buckets = armed(model, weight=0.0)
    model(torch.ones(2, 2), left=True).sum().backward()
    assert model.left.weight.grad is not None
    buckets.install()
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_a_parameter_that_someone_used_has_the_sum_and_one_that_no_one_used_has_none():
    model = Branches()
    buckets = armed(model, weight=0.25)
    model(torch.ones(2, 2), left=True).sum().backward()
    buckets.install()
    assert model.left.weight.grad.tolist() == [[0.5, 0.5]]
    assert model.right.weight.grad is None


def test_a_second_backward_in_one_step_is_refused_and_one_after_the_step_is_not():
    model = Branches()
    buckets = armed(model)
    model(torch.ones(2, 2), left=True).sum().backward()
    with pytest.raises(RuntimeError, match="was called twice for one batch"):
        model(torch.ones(2, 2), left=True).sum().backward()
    buckets.disarm()
    model(torch.ones(2, 2), left=True).sum().backward()


def test_a_parameter_that_is_unfrozen_later_is_refused():
    model = Branches()
    model.right.requires_grad_(False)
    buckets = armed(model)
    buckets.check_frozen()
    model.left.requires_grad_(False)  # to freeze one is no matter
    buckets.check_frozen()
    model.right.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="was unfrozen after"):
        buckets.check_frozen()


def test_a_step_that_is_to_be_done_again_finds_batch_norm_as_it_was():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    buckets = armed(model)
    buckets.keep_stats()
    before = {name: b.clone() for name, b in model.named_buffers()}
    model(torch.randn(4, 2))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    buckets.restore_stats()
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_the_averages_of_a_completed_step_are_what_a_broken_one_goes_back_to():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    buckets = armed(model)
    model(torch.randn(4, 2)).sum().backward()
    buckets.install()
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert int(before["1.num_batches_tracked"]) == 1
    model(torch.randn(4, 2))
    buckets.restore_stats()
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
