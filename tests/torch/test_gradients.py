"""Gradient buckets by themselves, with a fake group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from shoal.torch.gradients import GradientBuckets, sum_of_one
from torch import nn


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, left: bool):
        return (self.left if left else self.right)(x)


def armed(model: nn.Module, weight: float = 1.0) -> GradientBuckets:
    buckets = GradientBuckets(model)
    buckets.arm(None, sum_of_one, weight, first=True, last=True)
    return buckets


def test_a_worker_without_a_part_keeps_no_gradient_of_its_own():
    model = Branches()
    buckets = armed(model, weight=0.0)
    model(torch.ones(2, 2), left=True).sum().backward()
    assert model.left.weight.grad is not None
    buckets.install()
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_a_parameter_that_someone_used_has_the_sum_and_one_that_nobody_used_has_none():
    model = Branches()
    buckets = armed(model, weight=0.25)
    model(torch.ones(2, 2), left=True).sum().backward()
    buckets.install()
    assert model.left.weight.grad.tolist() == [[0.5, 0.5]]
    assert model.right.weight.grad is None


def test_the_scripts_own_hooks_see_gradients_also_while_it_observes():
    model, seen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), []
    buckets = GradientBuckets(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    for bucket in buckets.buckets:
        bucket.flat.fill_(7.0)  # the others' sums
    buckets.let_go()
    buckets.aside.checks = False
    buckets.watch()
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == sorted(p.shape for p in model.parameters())
    buckets.install()
    assert all((p.grad == 7.0).all() for p in model.parameters())


def test_the_rest_of_a_void_step_finds_gradients_after_observing():
    model = nn.Linear(2, 3)
    buckets = GradientBuckets(model)
    buckets.let_go()
    buckets.watch()
    model(torch.ones(1, 2)).sum().backward()
    buckets.renew()  # its generation broke
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


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
    model.left.requires_grad_(False)  # freezing is allowed
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


def test_a_broken_step_restores_the_averages_of_the_last_completed_one():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    buckets = armed(model)
    model(torch.randn(4, 2)).sum().backward()
    buckets.install()
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert int(before["1.num_batches_tracked"]) == 1
    model(torch.randn(4, 2))
    buckets.restore_stats()
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_a_gradient_is_in_its_bucket_before_backward_makes_the_next():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    armed(model)
    seen = []
    # Hooks of one parameter run in the order of their registration: this one comes after that of the buckets.
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad._base is not None))
    model[0].weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(model[1].weight.grad._base is not None)
    )
    model(torch.ones(2, 2)).sum().backward()
    assert seen == [True, True], "the memory that autograd made a gradient in is kept"


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_equal_those_of_a_plain_loop_however_gradients_are_zeroed(to_none, micro_batches):
    torch.manual_seed(0)
    plain, ours = Branches(), Branches()
    ours.load_state_dict(plain.state_dict())
    buckets = GradientBuckets(ours)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1) for m in (plain, ours)]
    for step in range(4):
        batches = torch.randn(micro_batches, 5, 2)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        for i, x in enumerate(batches):
            left = (step + i) % 2 == 0
            (plain(x, left).pow(2).mean() * 0.5).backward()
            buckets.arm(None, sum_of_one, 0.5, first=i == 0, last=i == micro_batches - 1)
            ours(x, left).pow(2).mean().backward()
        buckets.install()
        for optimizer in optimizers:
            optimizer.step()
        for theirs, mine in zip(plain.parameters(), ours.parameters()):
            assert (theirs.grad is None) == (mine.grad is None)
            torch.testing.assert_close(mine, theirs)


def test_after_a_broken_collective_no_gradient_is_left_in_memory_into_which_it_may_still_write():
    model = Branches()
    buckets = armed(model)
    model(torch.ones(2, 2), left=True).sum().backward()
    old = [bucket.flat for bucket in buckets.buckets]
    buckets.renew()
    for flat in old:
        flat.fill_(torch.nan)
    assert model.left.weight.grad.isfinite().all()
    assert model.right.weight.grad is None


def test_parameters_of_the_optimizer_that_are_not_of_the_model_are_synchronized_too():
    model, scale = Branches(), nn.Parameter(torch.ones(1))
    buckets = GradientBuckets(model, others=[scale])
    buckets.arm(None, sum_of_one, 0.25, first=True, last=True)
    (model(torch.ones(1, 2), left=True) + 4 * scale).sum().backward()
    buckets.install()
    assert scale.grad.tolist() == [1.0]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_of_its_own_is_taken_as_it_is():
    model = Branches()
    buckets = armed(model, weight=0.5)
    with torch.no_grad():
        model.left.weight.fill_(1.0)
        model.left.bias.fill_(1.0)
    model(torch.ones(1, 2), left=True).pow(2).sum().backward(create_graph=True)
    buckets.install()
    assert model.left.weight.grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("left", [True, False], ids=["reached again", "not reached again"])
def test_a_gradient_from_before_counts_once_in_a_sum_over_workers_with_weight_1(left: bool):
    model = Branches()
    buckets = GradientBuckets(model)
    x = torch.ones(1, 2)
    buckets.arm(None, sum_of_one, 1.0, first=True, last=True, earlier=0.25)
    model(x, left=True).sum().backward()
    buckets.install()
    assert model.left.weight.grad.tolist() == [[1.0, 1.0]]
    buckets.arm(None, sum_of_one, 1.0, first=True, last=True, earlier=0.25)
    model(x, left=left).sum().backward()
    buckets.install()
    # This worker's part of the sum: a quarter of what is from before, and its own gradient.
    assert model.left.weight.grad.tolist() == [[1.25 if left else 0.25] * 2]


def test_a_gradient_from_before_is_refused_where_its_weight_is_not_known_yet():
    model = Branches()
    buckets = GradientBuckets(model)
    for left in (True, False):
        buckets.arm(None, sum_of_one, 3.0, first=True, last=True, earlier=None)
        model(torch.ones(1, 2), left=left).sum().backward()
        buckets.install()
        model.zero_grad(set_to_none=False)
    for left in (True, False):
        model.left.weight.grad = torch.ones(1, 2)
        buckets.arm(None, sum_of_one, 3.0, first=True, last=True, earlier=None)
        with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) in each"):
            model(torch.ones(1, 2), left=left).sum().backward()
