"""Errors of torch that do not say what to do in a Shoal job: the reason of the failed job does."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from shoal.torch.advice import advice_for
from shoal.torch.exits import report_exit
from torch import nn

OWN_GROUPS: dict[str, Callable[[], Any]] = {
    "fully_shard without a mesh": lambda: fully_shard(nn.Linear(2, 2)),
    "init_process_group": lambda: dist.init_process_group("gloo"),
    "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
}


class Reporter:
    training = True

    def __init__(self) -> None:
        self.whys: list[str] = []

    def fail(self, why: str) -> None:
        self.whys.append(why)

    def await_end(self) -> None: ...


@pytest.mark.parametrize("what", OWN_GROUPS)
def test_a_script_that_forms_its_own_groups_is_told_what_to_do(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    reporter = Reporter()
    report_exit(reporter, lambda: None)
    with pytest.raises(ValueError) as raised:  # torch's own words may change
        OWN_GROUPS[what]()
    sys.excepthook(raised.type, raised.value, raised.tb)
    last = reporter.whys[0].strip().splitlines()[-1]
    for name in ("job.wrap(model, optimizer)", "job.shard(model, optimizer)", "mesh=job.mesh()"):
        assert name in last
    assert last in capsys.readouterr().err


def test_other_errors_are_left_as_they_are() -> None:
    assert advice_for(ValueError("the batch is empty")) is None
