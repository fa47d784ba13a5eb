"""Mistakes with sharded models: an error at the start that says what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shoal.torch as shoal
import torch
from shoal.torch.sharding import private
from shoal.torch.sharding.versions import check_sharding
from torch import nn


@pytest.mark.parametrize("gpus", ["", "2", "4", "2..8:2", "4..8:4"])
def test_ranges_that_fit_groups_of_two(gpus: str):
    check_sharding(2, None, {"SHOAL_GPUS": gpus} if gpus else {})


@pytest.mark.parametrize(
    ("gpus", "fits"),
    [("3", "--gpus 4"), ("1..8", "--gpus 2..8:2"), ("2..8", "--gpus 2..8:2"), ("3..9:3", "--gpus 4..8:2")],
)
def test_a_range_that_is_no_multiple_of_the_group_is_refused_with_one_that_is(gpus: str, fits: str):
    with pytest.raises(ValueError, match="needs multiples of 2 GPUs, and the job has") as raised:
        check_sharding(2, None, {"SHOAL_GPUS": gpus})
    assert str(raised.value).endswith(fits)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": 1}, "a replicated model is for job.wrap"),
        ({"group": 2, "copy_every": 5}, "the other groups have copies of all rows"),
        ({"copy_every": 0}, "copy_every must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict, says: str):
    with pytest.raises(ValueError, match=says):
        check_sharding(options.get("group"), options.get("copy_every"), {})


@pytest.fixture
def own_group() -> Iterator[None]:
    """A script that has initialized torch.distributed itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("own_group")
def test_a_model_that_was_sharded_without_the_jobs_mesh_is_refused():
    model, _ = model_and_optimizer()
    fully_shard(model)
    job = shoal.init()
    with pytest.raises(RuntimeError, match="leave out init_process_group, Shoal forms the groups"):
        job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_cannot_be_resized_is_refused():
    job = shoal.init()
    mesh = job.mesh()
    try:
        model, optimizer = model_and_optimizer()
        with pytest.raises(RuntimeError, match="use layer or group norm"):
            job.shard(nn.Sequential(model, nn.BatchNorm1d(2)), optimizer)
        with pytest.raises(ValueError, match="layers must be modules within the model"):
            job.shard(model, optimizer, layers=[nn.Linear(1, 1)])
        fully_shard(model[0], mesh=mesh)
        with pytest.raises(RuntimeError, match="apply fully_shard to the whole model, too"):
            job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        private.forget(mesh)
