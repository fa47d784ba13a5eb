"""An upgrade carries jobs over: from a version with another wire protocol, and never by losing one silently."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.server.store.carried_over import CannotCarryOver
from shoal.server.store.store import Store
from shoal.wire import messages
from shoal.wire.auth import AuthError, Request, challenge
from shoal.wire.messages import Kind, Order, Plan, encode
from shoal.wire.previous import PREVIOUS_PROTOCOL

from .test_crash import RealServer

DATA = Path(__file__).parents[1] / "data"
COUNT = Path(__file__).parents[2] / "bench" / "_count_samples.py"


def submit(live: RealServer, script: Path, epochs: int, result: Path) -> int:
    words = (sys.executable, str(script), "24", "4", str(epochs), "2", str(result))
    return int(live.submit(*words, gpus="2", resize="live")["id"])


def train(live: RealServer, job: int) -> None:
    """Wait until the job has done some steps."""
    deadline = time.monotonic() + 120
    while (live.until(job, "running", timeout_s=120)["step"] or 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def script_with(addition: str, path: Path) -> Path:
    """The script that counts samples, with something more in each step."""
    begin = "        optimizer.zero_grad()\n"
    text = COUNT.read_text()
    assert begin in text
    path.write_text(text.replace(begin, f"        {addition}\n{begin}"))
    return path


@pytest.mark.parametrize(
    ("previous", "addition"),
    [
        ("shoal-protocol-3.tar.xz", "pass"),
        ("shoal-peer-protocol-1.tar.xz", "assert job.mean(1.0) == 1.0 and job.sum(1) == job.world_size"),
    ],
    ids=["protocol 3", "peer protocol 1"],
)
def test_a_running_and_a_paused_job_of_the_previous_version_go_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, previous: str, addition: str
) -> None:
    """Old workers save their state when the new server asks them, and new workers continue from it."""
    with tarfile.open(DATA / previous) as archive:
        archive.extractall(tmp_path / "previous", filter="data")
    script = script_with(addition, tmp_path / "count.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "previous"))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # nothing is compiled there yet, which would take long
    live = RealServer(tmp_path / "home", "--gpus", "5", "--policy", "max-min")
    try:
        results = [tmp_path / "running.json", tmp_path / "paused.json"]
        running, paused = submit(live, script, 12, results[0]), submit(live, script, 10, results[1])
        train(live, running)
        train(live, paused)
        live.http.post(f"/jobs/{paused}/pause")
        while live.until(paused, "paused")["gpus"]:
            time.sleep(0.05)
        live.kill()

        monkeypatch.setenv("PYTHONPATH", os.environ["SHOAL_TEST_PYTHONPATH"])
        monkeypatch.delenv("NUMBA_DISABLE_JIT")
        live.up()
        live.http.post(f"/jobs/{running}/scale", json={"min": 3, "max": 3}).raise_for_status()
        events = {"job": running, "type": "job.renewed"}
        deadline = time.monotonic() + 120
        while not live.http.get("/events", params=events).json()["items"]:
            assert time.monotonic() < deadline, live.job(running)
            time.sleep(0.05)  # the old workers are still running, and are asked to save their state
        for result in results:
            Path(f"{result}.hurry").touch()
        live.http.post(f"/jobs/{paused}/resume")
        for job in (paused, running):
            found = live.until(job, "succeeded", "failed", timeout_s=180)
            assert found["state"] == "succeeded", found["message"]
            assert found["restarts"] == 0
        assert [json.loads(result.read_text()) for result in results] == [[12.0], [10.0]]
    finally:
        live.down()


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember where this version's modules are, before a test points elsewhere."""
    here = str(Path(messages.__file__).parents[2])
    monkeypatch.setenv("SHOAL_TEST_PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


def test_an_order_to_a_previous_worker_has_only_fields_that_it_knows() -> None:
    plan = Plan(number=2, kind=Kind.PAUSE, members=(), save="/home/jobs/1/paused.pt")
    raw = json.loads(encode(Order(seq=1, plan=plan, fresh=True), PREVIOUS_PROTOCOL))
    assert set(raw) == {
        *("type", "seq", "dead", "plan", "commit", "board", "signed", "first", "checkpoint", "stop")
    }
    assert raw["plan"]["save"] == "/home/jobs/1/paused.pt"


def test_a_port_speaks_one_protocol() -> None:
    hello, _ = challenge(PREVIOUS_PROTOCOL)
    assert int.from_bytes(hello[5:7], "big") == PREVIOUS_PROTOCOL
    request = {"protocol": messages.PROTOCOL, "purpose": "worker", "job": "1", "nonce": "", "proof": ""}
    with pytest.raises(AuthError, match="this end speaks 3"):
        Request.parse(json.dumps(request).encode(), PREVIOUS_PROTOCOL)


FIRST: dict[str, Any] = {
    "job": "1", "pause_path": "", "pausing": False, "recovering": False, "dead": 0, "issued": 1, "target": ["1.0"],
    "crew": ["1.0"], "signature": None, "checkpoint": None, "checkpoint_step": 0, "checkpoints_asked": 0,
    "paused": None, "outcome": None, "active": {"number": 1, "members": ["1.0"]}, "pending": None,
    "workers": {"1.0": {"alive": True, "stopping": False, "announced": True, "met": True}},
}  # fmt: skip
"""What a coordinator with protocol 1 saved. No version up to protocol 3 wrote the number."""
SECOND = FIRST | {"untold": None, "stranded": False}
THIRD = SECOND | {"workers": {"1.0": FIRST["workers"]["1.0"] | {"why": "no longer wanted"}}}


@pytest.mark.parametrize(
    ("coordinator", "settings", "refusal"),
    [
        (THIRD, {"control_protocol": 2}, "saved states of version 2"),
        (THIRD, {"control_protocol": 2, "checkpoint_version": 3}, "1 live job of .* runs with protocol 2"),
        (THIRD, {"control_protocol": 99}, "protocol 99"),
        (THIRD, {"checkpoint_version": 1}, "saved states of version 1"),
        (FIRST, {}, "saved states of version 1"),
        (SECOND, {}, "saved states of version 2"),
        (THIRD, {}, None),
        (THIRD, {"control_protocol": messages.PROTOCOL}, None),
        (THIRD, {"control_protocol": PREVIOUS_PROTOCOL}, None),
    ],
)
def test_what_cannot_be_carried_over_is_refused_before_anything_changes(
    tmp_path: Path, coordinator: dict[str, Any], settings: dict[str, int], refusal: str | None
) -> None:
    database = tmp_path / "shoal.db"
    row = {
        "name": "a", "user": "ada", "state": "running", "spec": {}, "given": [], "min_gpus": 1, "max_gpus": 2,
        "requested_gpus": 1, "resize": "live", "model": "m", "submitted_s": 0.0, "settled_s": 0.0,
        "coordinator": coordinator,
    }  # fmt: skip
    store = Store(f"sqlite:///{database}")
    with store.change(0.0) as change:
        job = change.add_job(**row)
        change.add_workers(
            [{"id": f"{job}.0", "job": job, "node": "local", "gpu": 0, "state": "active", "started_s": 0.0}]
        )
        for setting, value in settings.items():
            change.put(setting, value)
    store.close()
    before = database.read_bytes()
    if refusal is None:
        Store(f"sqlite:///{database}").close()
    else:
        with pytest.raises(CannotCarryOver, match=refusal):
            Store(f"sqlite:///{database}")
        assert database.read_bytes() == before
