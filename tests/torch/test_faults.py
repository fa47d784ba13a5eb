"""Faults of scripts, disks, peers and settings."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import threading

import pytest
from elastic_lab import PROBE, Lab, seen, until
from fakes import make_replica

import shoal.torch as shoal
import torch
from shoal.torch.receiver import MAX_STRANGERS, Receiver
from shoal.torch.state_files import write_atomically
from shoal.torch.stream import PLAIN, Streams
from shoal.torch.worker import Identity
from shoal.wire import channel
from shoal.wire import events as ev
from shoal.wire.auth import new_secret, write_secret
from torch import nn


def refused(job, lab: Lab, since: int = 0) -> str:
    """A newcomer is refused, and the two others train to the end. Returns the reason."""
    event = job.wait(lambda e: isinstance(e, ev.WorkerRefused), since=since)
    lab.say("hurry")
    assert isinstance(job.wait_end(), ev.JobFinished)
    assert {r["size"] for r in lab.rows()} == {2}
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(20)}
    return event.why


WRONG = {
    "another model": (
        "hidden.w2",
        "33",
        "'parameter 0.weight float32 [32, 16]', this worker has 'parameter 0.weight float32 [33, 16]'",
    ),
    "another data set": ("samples.w2", "239", "'data set length 240', this worker has 'data set length 239'"),
    "out of memory": ("fail_at_start.w2", "yes", "MemoryError: cannot allocate a terabyte"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_newcomer_that_does_not_fit_is_refused_and_the_job_continues(lab: Lab, wrong: str):
    word, text, why = WRONG[wrong]
    lab.say(word, text)
    with lab.job(2, epochs=20) as job:
        job.wait_size(2)
        job.resize(3)
        assert why in refused(job, lab)


DIES_AT_ITS_START = """
import os, pathlib, runpy, signal
mark = pathlib.Path(os.environ["PROBE_DIR"], "killed" + os.environ["SHOAL_WORKER"] * {every_worker})
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
runpy.run_path({probe!r}, run_name="__main__")
"""


def test_a_worker_that_is_killed_as_it_starts_is_replaced_like_any_lost_worker(lab: Lab):
    script = lab.directory / "killed_once.py"
    script.write_text(DIES_AT_ITS_START.format(every_worker=False, probe=str(PROBE)))
    lab.say("hurry")
    with lab.job(2, script, epochs=2, keep_size=True) as job:
        job.wait_size(2)
        assert isinstance(job.wait_end(), ev.JobFinished)
    assert seen(lab.rows()) == {e: list(range(240)) for e in range(2)}


def test_workers_that_are_all_killed_as_they_start_end_the_job(lab: Lab):
    script = lab.directory / "killed_always.py"
    script.write_text(DIES_AT_ITS_START.format(every_worker=True, probe=str(PROBE)))
    with lab.job(2, script, epochs=2, keep_size=True) as job:
        end = job.wait_end()
        assert isinstance(end, ev.JobFailed)
        assert "workers die repeatedly" in end.why


def test_an_exception_in_one_workers_step_ends_the_job_with_that_traceback_once(lab: Lab):
    with lab.job(3, epochs=50, keep_size=True) as job:
        job.wait_size(3)
        lab.say("fail_in_step.w1")
        end = job.wait_end()
        assert isinstance(end, ev.JobFailed)
        assert end.worker == "w1"
        assert "ZeroDivisionError: the script divides by zero" in end.why
        assert 'raise ZeroDivisionError("the script divides by zero")' in end.why
        job.wait_gone()
        assert sum(isinstance(e, ev.JobFailed) for _, e in job.events) == 1
        assert job.logs().count("Traceback") == 1


MISTAKES = {
    "skip": "the loop's body must call backward() for every batch",
    "backward_twice": "backward() was called twice for one batch",
    "exit": "the script called sys.exit('that is enough')",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_worker_ends_the_job_and_is_named(lab: Lab, mistake: str):
    with lab.job(2, epochs=50, keep_size=True) as job:
        job.wait_size(2)
        lab.say(f"{mistake}.w1")
        end = job.wait_end()
        assert isinstance(end, ev.JobFailed)
        assert end.worker == "w1"
        assert MISTAKES[mistake] in end.why


def test_a_process_that_the_script_forks_does_not_report_for_the_worker(lab: Lab):
    with lab.job(2, epochs=6) as job:
        job.wait_size(2)
        lab.say("fork.w1")
        until(lambda: "this is only a child" in job.logs())
        (lab.directory / "fork.w1").unlink()
        lab.say("hurry")
        assert isinstance(job.wait_end(), ev.JobFinished)
        job.wait_gone(30)


STREAMS = Streams("job", "127.0.0.1", b"s" * 32, None)


def receiver() -> Receiver:
    return Receiver(STREAMS, threading.Condition(threading.RLock()))


def test_unauthenticated_connections_to_the_state_port_are_limited_and_never_shut_a_newcomer_out():
    port = receiver()
    where = channel.parse_address(port.address)
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(MAX_STRANGERS + 1):
            strangers.append(stack.enter_context(socket.create_connection(where)))
            strangers[-1].sendall(PLAIN)
            assert strangers[-1].recv(1)  # the handshake begins
        assert greeted(port), "a peer that knows the secret"
        assert strangers[0].recv(4096)  # the rest of the challenge
        assert strangers[0].recv(4096) == b"", "the oldest stranger lost its place"
    until(lambda: greeted(port))


def test_an_unauthenticated_peer_that_sends_byte_by_byte_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.5)
    with socket.create_connection(channel.parse_address(receiver().address)) as stranger:
        stranger.sendall(PLAIN + (2000).to_bytes(2, "big"))
        assert stranger.recv(4096)
        stranger.settimeout(0.05)
        assert is_cut(stranger)


def is_cut(sock: socket.socket, bytes_sent: int = 100) -> bool:
    """Whether the other end closes while so many bytes are sent, one by one."""
    for _ in range(bytes_sent):
        try:
            sock.sendall(b"x")
            if not sock.recv(4096):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def greeted(port: Receiver) -> bool:
    try:
        STREAMS.open(port.address, 1 << 16).close()
    except OSError:
        return False
    return True


def test_a_link_of_a_plan_that_is_over_is_not_kept():
    port = receiver()
    port.forget(3)
    for number, kept in ((3, False), (4, True)):
        link = STREAMS.open(port.address, 1 << 16)
        link.send_head({"plan": number, "source": "w0"})
        if kept:
            until(lambda: 4 in port._early)
        else:
            with pytest.raises(ConnectionError):
                link.receive_head()
        link.close()
    port.forget(4)
    assert not port._early


def test_a_full_disk_at_a_checkpoint_leaves_the_old_one_valid(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state.pt"
    monkeypatch.delenv("SHOAL_CONTROL", raising=False)
    job = shoal.init(checkpoint=path)
    model = nn.Linear(2, 1)
    job.wrap(model, torch.optim.Adam(model.parameters()))
    assert job.checkpoint()
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert not job.checkpoint()
    assert "No space left" in job.meter.notes[-1]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_while_torch_writes_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state.pt"
    monkeypatch.delenv("SHOAL_CONTROL", raising=False)
    job = shoal.init(checkpoint=path)
    model = nn.Linear(1000, 100)
    job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert not job.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large; the last one is kept" in job.meter.notes[-1]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path):
    def half(file) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a", half)
    assert list(tmp_path.iterdir()) == []


def named(monkeypatch: pytest.MonkeyPatch, **secret: str) -> None:
    for name, value in {"CONTROL": "127.0.0.1:1", "JOB": "job", "WORKER": "w0", **secret}.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)


def test_the_secret_may_come_through_a_descriptor_which_is_read_once(monkeypatch: pytest.MonkeyPatch):
    secret = new_secret()
    reading, writing = os.pipe()
    os.write(writing, secret.hex().encode() + b"\n")
    os.close(writing)
    named(monkeypatch, SECRET_FD=str(reading), SECRET_FILE="/nowhere")
    assert Identity.from_environment().key.secret == secret
    with pytest.raises(OSError):
        os.fstat(reading)
    with pytest.raises(RuntimeError, match=f"SHOAL_SECRET_FD: cannot read '{reading}'"):
        Identity.from_environment()


def test_a_missing_or_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path):
    named(monkeypatch)
    with pytest.raises(RuntimeError, match="neither SHOAL_SECRET_FILE nor SHOAL_SECRET_FD"):
        Identity.from_environment()
    write_secret(tmp_path / "secret", new_secret())
    named(monkeypatch, SECRET_FILE=str(tmp_path / "secret"), STATE_BYTES_PER_S="fast")
    with pytest.raises(RuntimeError, match="SHOAL_STATE_BYTES_PER_S must be a number >= 0, not 'fast'"):
        Identity.from_environment()


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int):
        return torch.tensor([float(i)])


def alone() -> tuple[shoal.Job, nn.Module, torch.optim.Optimizer]:
    job = shoal.init()
    model = nn.Linear(1, 1)
    return job, *job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))


SPLIT = torch.utils.data.DistributedSampler(Numbers(), num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 4, "max_batch_size": 2}, "max_batch_size 2 is below batch_size 4"),
        ({"batch_size": 4, "lr_rule": "cubic"}, "lr_rule must be"),
        ({"batch_size": 4, "accumulate": 0}, "accumulate must be at least 1"),
        ({"batch_size": 4, "in_order": False}, "batches always come in the order of the job"),
        (
            {"batch_size": 4, "batch_sampler": [[1, 2]]},
            "give a sampler, and batch_size for all workers together",
        ),
        ({"batch_size": 4, "generator": torch.Generator()}, r"shoal.init\(seed=...\)"),
        ({"batch_size": 4, "num_workers": 1, "persistent_workers": False}, "define set_epoch"),
        ({"batch_size": 4, "sampler": iter([1, 2])}, "the sampler needs a length: define __len__"),
        ({"batch_size": 4, "sampler": [1, 2], "shuffle": True}, "give either shuffle or a sampler"),
        ({"batch_size": 4, "sampler": SPLIT}, "the job splits each batch over its workers itself"),
        ({"batch_size": 4, "loss": "max"}, "loss must be 'mean' or 'sum'"),
        ({"batch_size": 400, "drop_last": True}, "drop_last leaves nothing"),
    ],
)
def test_wrong_options_of_the_loader_are_refused(options: dict, message: str):
    job, *_ = alone()
    with pytest.raises(ValueError, match=message):
        job.loader(Numbers(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "every sample is used once, in order"),
        ({"drop_last": True}, "every sample is used once, in order"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_wrong_options_of_an_evaluation_loader_are_refused(options: dict, message: str):
    job, *_ = alone()
    with pytest.raises(ValueError, match=message):
        job.eval_loader(Numbers(), **{"batch_size": 4, **options})


def test_a_model_that_another_wrapper_distributes_is_refused():
    model = nn.DataParallel(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="wrapped in DataParallel: leave it out"):
        shoal.init().wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_batch_norm_that_would_not_be_synchronized_is_refused():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    with pytest.raises(ValueError, match="use BatchNorm, whose running statistics"):
        shoal.init().wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_second_sharded_model_is_refused_with_what_is_possible():
    replica = make_replica()
    with pytest.raises(RuntimeError, match=r"make them parts of one module, .* or replicate them: job\.wrap"):
        replica.check_empty(shards=True)
    with pytest.raises(RuntimeError, match="pass everything at once"):
        replica.check_empty()


def test_a_closure_is_refused():
    *_, optimizer = alone()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_pass_that_is_left_early_does_not_load_the_rest_of_its_epoch(tmp_path):
    loaded = tmp_path / "loaded"

    class Counted(Numbers):
        def __getitem__(self, i: int):
            with loaded.open("a") as file:
                file.write(".")
            return super().__getitem__(i)

    job, model, optimizer = alone()
    loader = job.loader(Counted(1000), batch_size=4, num_workers=1)
    for _ in job.epochs(3):
        for count, x in enumerate(loader):
            model(x).sum().backward()
            optimizer.step()
            if count == 1:
                break
    assert len(loaded.read_text()) < 150


def test_an_empty_data_set_and_a_second_loader_are_refused():
    job, *_ = alone()
    with pytest.raises(ValueError, match="the data set is empty"):
        job.loader(Numbers(0), batch_size=4)
    job.loader(Numbers(), batch_size=4)
    with pytest.raises(RuntimeError, match="one training loader"):
        job.loader(Numbers(), batch_size=4)


def interrupted(path, samples: int = 10, inputs: int = 1, steps: int = 3) -> None:
    """A run that ends after some steps, with a checkpoint."""
    job = shoal.init(checkpoint=path)
    model = nn.Linear(inputs, 1)
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = job.loader(Numbers(samples), batch_size=4)
    for _ in job.epochs(9):
        for x in loader:
            model(x.expand(-1, inputs)).pow(2).mean().backward()
            optimizer.step()
            job.checkpoint()
            steps -= 1
            if not steps:
                return


def test_a_checkpoint_of_another_model_or_within_other_data_is_refused_with_the_difference(tmp_path):
    path = tmp_path / "c.pt"
    interrupted(path, steps=5)
    with pytest.raises(RuntimeError, match=r"it has 'parameter weight float32 \[1, 1\]', this script has"):
        interrupted(path, inputs=2)
    with pytest.raises(RuntimeError, match="within epoch 1: the data set had 10 samples and has 11 now"):
        interrupted(path, samples=11)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(RuntimeError, match="it is damaged"):
        interrupted(path)


def test_between_two_epochs_a_run_may_continue_with_other_data(tmp_path):
    interrupted(tmp_path / "c.pt", steps=3)  # the last step of an epoch
    interrupted(tmp_path / "c.pt", samples=11, steps=1)
    job = shoal.init(checkpoint=tmp_path / "c.pt")
    model = nn.Linear(1, 1)
    job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
    job.loader(Numbers(11), batch_size=4)
    next(job.epochs(9))
    assert (job.position.epoch, job.position.cursor, job.position.step) == (1, 4, 4)


def test_outside_shoal_a_script_is_a_plain_process_and_continues_from_its_checkpoint(tmp_path):
    ids: list[float] = []

    def train(epochs: int, steps: int) -> dict:
        torch.manual_seed(0)
        job = shoal.init(checkpoint=tmp_path / "c.pt")
        model = nn.Linear(1, 1)
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loader = job.loader(Numbers(), batch_size=4)
        for _ in job.epochs(epochs):
            for x in loader:
                ids.extend(x.flatten().tolist())
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
                job.checkpoint()
                steps -= 1
                if not steps:
                    return {}
        return {k: v.tolist() for k, v in model.state_dict().items()}

    train(2, 4)
    interrupted = train(2, 99)
    assert sorted(ids[:10]) == sorted(ids[10:]) == [float(i) for i in range(10)]
    (tmp_path / "c.pt").unlink()
    assert json.dumps(train(2, 99)) == json.dumps(interrupted)
