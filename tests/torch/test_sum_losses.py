"""Which losses are seen to be sums."""

from __future__ import annotations

import pytest
from torch.nn import functional

import torch
from shoal.torch.sum_losses import is_sum, refusing_sums

X, Y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
T = torch.rand(4, 3)

SCALER = torch.amp.GradScaler("cpu")

LOSSES = {
    "cross entropy, summed": (functional.cross_entropy(X, Y, reduction="sum"), True),
    "cross entropy, a mean": (functional.cross_entropy(X, Y), False),
    "squares, summed": (functional.mse_loss(X, T, reduction="sum"), True),
    "absolute differences, summed": (functional.l1_loss(X, T, reduction="sum"), True),
    "of a variational autoencoder": (
        functional.binary_cross_entropy_with_logits(X, T, reduction="sum") - 0.5 * X.exp().sum(),
        True,
    ),
    "a sum": ((X - T).square().sum(), True),
    "two sums": ((X - T).square().sum() + X.abs().sum(), True),
    "a sum divided by the number of tokens": (functional.cross_entropy(X, Y, reduction="sum") / 4, False),
    "a mean with a sum of squared weights": (functional.cross_entropy(X, Y) + X.square().sum(), False),
    "a sum that a GradScaler has scaled": (SCALER.scale((X - T).square().sum()), True),
    "a sum that the script has scaled": (1024 * (X - T).square().sum(), True),
    "a mean that a GradScaler has scaled": (SCALER.scale((X - T).square().mean()), False),
    "a mean from a sum that a GradScaler has scaled": (SCALER.scale((X - T).square().sum() / 4), False),
    "a sum times the share of a sample": ((X - T).square().sum() * 0.25, False),
    "a product of two sums": (X.square().sum() * X.abs().sum(), False),
    "a masked mean": ((X * T).sum() / T.sum(), False),
}
del SCALER  # a job would ask for it in job.state


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_is_told_from_a_mean(name: str):
    loss, expected = LOSSES[name]
    assert is_sum(loss.grad_fn) is expected


WHOLE = frozenset({64})
DIVIDED = {
    "by the size of the batch": ((X - T).square().sum() / 64, True),
    "by that, and scaled": (1024 * (functional.cross_entropy(X, Y, reduction="sum") / 64), True),
    "times one over the size of the batch": ((X - T).square().sum() * (1 / 64), True),
    "by this worker's samples": ((X - T).square().sum() / len(X), False),
    "64 divided by a sum": (64 / (X - T).square().sum(), False),
    "a mean, divided by the size of the batch": (functional.cross_entropy(X, Y) / 64, False),
    "times nothing": ((X - T).square().sum() * 0, False),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sum_that_is_divided_by_the_batch_of_all_workers_is_no_mean(name: str):
    loss, expected = DIVIDED[name]
    assert is_sum(loss.grad_fn, WHOLE) is expected
    assert not is_sum(loss.grad_fn), "a worker may have the whole batch"


def test_only_the_first_backward_within_it_is_looked_at():
    before = torch.Tensor.backward
    with refusing_sums(True):
        with pytest.raises(RuntimeError, match=r"job\.loader\(\.\.\., loss='sum'\)"):
            X.square().sum().backward()
        X.square().sum().backward()
    with refusing_sums(True):
        pass
    assert torch.Tensor.backward is before
