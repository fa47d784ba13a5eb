"""Real training processes under the real server: they grow, shrink, and survive what happens to them."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from live_cluster import eventually

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
FALLING = SCRIPT.with_name("falling_loss.py")
pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)


def submit(cluster, name, *, gpus, steps=2000, step_s=0.1, scaling=1.0):
    command = [sys.executable, str(SCRIPT), str(steps), str(step_s), str(scaling)]
    cluster.shoal("run", "-d", "--name", name, "--gpus", gpus, "--", *command, code=0)


def await_size(cluster, name, gpus):
    cluster.shoal("wait", name, "--for", f"size={gpus}", "--timeout", "60s", code=0, timeout=90)


def active(cluster, name):
    return {w["pid"] for w in cluster.json("show", name)["workers"] if w["state"] == "active"}


def test_a_job_shrinks_when_another_arrives_and_grows_when_it_ends(shared):
    # Steps long enough that each GPU plainly makes them shorter, also where four workers share busy cores.
    submit(shared, "a", gpus="1..4", step_s=1.6)
    await_size(shared, "a", 4)
    submit(shared, "b", gpus="1..4", steps=4, step_s=1.6)
    await_size(shared, "a", 2)
    survivors = active(shared, "a")
    shared.shoal("wait", "b", "--timeout", "60s", code=0, timeout=90)
    await_size(shared, "a", 4)
    larger = active(shared, "a")
    assert len(larger) == 4
    assert survivors <= larger, "the survivors trained on, without a restart"
    job = shared.json("show", "a")
    assert job["resizes"] >= 2
    assert job["restarts"] == 0
    sizes = [e["data"]["gpus"] for e in shared.json("events", "a", "--type", "job.resized")["items"]]
    assert sizes[0] == 2
    assert sizes[-1] == 4
    took = shared.json("why", "a", "--preempted")["preempted"]
    assert (took["from_gpus"], took["to_gpus"]) == (4, 2)
    assert [job["name"] for job in took["by"]] == ["b"]
    steps = [
        int(line.split()[2]) for line in shared.shoal("logs", "a").stdout.splitlines() if " step " in line
    ]
    assert steps == sorted(set(steps)), "every step counts once, over all sizes"


def test_a_job_that_does_not_scale_is_measured_and_gives_its_gpus_to_one_that_does(shared):
    shared.shoal("policy", "set", "optimus", code=0)
    submit(shared, "scales", gpus="1..4", steps=100_000, step_s=0.8)
    await_size(shared, "scales", 4)
    submit(shared, "flat", gpus="1..4", steps=100_000, step_s=0.8, scaling=0.0)
    eventually(
        lambda: [shared.json("show", name)["gpus"] for name in ("scales", "flat")] == [3, 1], timeout_s=90
    )
    events = shared.json("events", "--type", "job.measuring")["items"]
    assert any("steps: the next decision depends on it" in event["message"] for event in events)
    points = shared.json("profile", "flat")["points"]
    assert [point["gpus"] for point in points if point["measured"]]


def test_a_job_that_reaches_its_target_loss_saves_its_state_and_all_ranks_end_at_the_same_step(
    shared, tmp_path
):
    spec = {"name": "target", "gpus": "2..2", "resize": "live", "target_loss": 1.0, "workdir": str(tmp_path)}
    spec["command"] = [sys.executable, str(FALLING)]
    (tmp_path / "job.yaml").write_text(json.dumps(spec))
    shared.shoal("submit", "-d", "-y", "-f", str(tmp_path / "job.yaml"), code=0)
    shared.shoal("wait", "target", "--timeout", "120s", code=0, timeout=150)
    job = shared.json("show", "target")
    assert job["state"] == "succeeded"
    assert "its loss reached" in job["message"]
    events = shared.json("events", "target", "--tail", "100")["items"]
    kinds = [event["type"] for event in events]
    assert kinds.index("job.reached") < kinds.index("job.checkpoint") < kinds.index("job.succeeded")
    lines = shared.json("logs", "target")["items"]
    rule = "global batch 8 with 2 workers; learning rate x2 by the linear rule"
    assert any(rule in line["text"] for line in lines), "what the batch rule did is in the log"
    assert any(rule in event["message"] for event in events if event["type"] == "worker.note")
    steps = {0: [], 1: []}
    for line in lines:
        if line["text"].startswith("done "):
            steps[line["rank"]].append(int(line["text"].split()[1]))
    assert steps[0] == steps[1], "all ranks trained the same steps"
    assert 100 < steps[0][-1] < 10_000, "the loss is 1.0 after 100 steps, in the middle of the training"


def test_pause_keeps_the_state_and_resume_goes_on_from_it(shared):
    submit(shared, "a", gpus="1..2")
    await_size(shared, "a", 2)
    before = eventually(lambda: shared.json("show", "a")["step"])
    shared.shoal("pause", "a", code=0)
    shared.shoal("wait", "a", "--for", "paused", "--timeout", "30s", code=0)
    held = eventually(lambda: (job := shared.json("show", "a"))["gpus"] == 0 and job)
    assert held["state"] == "paused"
    shared.shoal("resume", "a", code=0)
    shared.shoal("wait", "a", "--for", "running", "--timeout", "60s", code=0, timeout=90)
    after = eventually(lambda: (step := shared.json("show", "a")["step"]) and step > before and step)
    assert after > before
    assert shared.json("show", "a")["paused_s"] > 0


def test_a_worker_that_is_killed_is_lost_and_the_job_trains_on(shared):
    submit(shared, "a", gpus="1..2")
    await_size(shared, "a", 2)
    before = eventually(lambda: shared.json("show", "a")["step"])
    victim = [w for w in shared.json("show", "a")["workers"] if w["state"] == "active"][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    lost = eventually(lambda: shared.json("events", "a", "--type", "worker.")["items"])
    eventually(
        lambda: any(
            e["type"] in ("worker.lost", "worker.ended") and "KILL" in str(e)
            for e in shared.json("events", "a", "--type", "worker.")["items"]
        ),
        what=f"the loss among {[e['type'] for e in lost]}",
    )
    eventually(lambda: (shared.json("show", "a")["step"] or 0) > before + 3)
    assert shared.json("show", "a")["state"] == "running"


def test_the_server_is_killed_and_its_successor_takes_the_workers_over(shared):
    submit(shared, "a", gpus="1..2")
    await_size(shared, "a", 2)
    following = shared.start("logs", "-f", "a", "--tail", "1")
    assert following.stdout.readline().startswith("[0] step")
    workers = active(shared, "a")
    step = eventually(lambda: shared.json("show", "a")["step"])
    shared.kill_server()
    assert all(psutil.pid_exists(pid) for pid in workers), "training goes on meanwhile"
    shared.shoal("ps", code=6)
    shared.up(gpus=4)
    eventually(lambda: (shared.json("show", "a")["step"] or 0) > step)
    job = shared.json("show", "a")
    assert active(shared, "a") == workers
    assert (job["state"], job["restarts"]) == ("running", 0)
    shared.shoal("cancel", "a", "-y", "--grace", "1s", code=0)
    out, said = following.communicate(timeout=60)
    assert following.returncode == 103, said
    steps = [int(line.split()[2]) for line in out.splitlines() if " step " in line]
    assert steps == sorted(set(steps)), "the log is followed over the loss of the server, line by line"
    assert steps[-1] > step


def test_workers_that_start_up_while_there_is_no_server_wait_for_its_successor(shared, tmp_path):
    gate, script = tmp_path / "gate", tmp_path / "late.py"
    script.write_text(
        "import pathlib, runpy, sys, time\n"
        f"print('at the gate', flush=True)\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.05)\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    shared.shoal(
        *("run", "-d", "--name", "a", "--gpus", "1..2", "--", sys.executable, script, "40", "0.1"), code=0
    )

    def have_printed(text):
        return sum(text in log.read_text() for log in shared.home.glob("jobs/*/workers/*/log.0")) == 2

    eventually(lambda: have_printed("at the gate"))
    workers = {w["pid"] for w in shared.json("show", "a")["workers"]}
    shared.kill_server()
    gate.touch()
    eventually(lambda: have_printed("waiting for it"))
    shared.up(gpus=4)
    eventually(lambda: shared.json("show", "a")["step"])
    assert active(shared, "a") == workers
    shared.shoal("wait", "a", "--timeout", "60s", code=0, timeout=90)
    assert shared.json("show", "a")["restarts"] == 0


def test_a_job_is_cancelled_while_it_prepares(shared):
    submit(shared, "a", gpus="1..2")
    eventually(lambda: shared.json("show", "a")["state"] in ("starting", "running"))
    shared.shoal("cancel", "a", "-y", "--grace", "1s", code=0)
    shared.shoal("wait", "a", "--timeout", "30s", code=103)
    eventually(lambda: shared.json("status")["used_gpus"] == 0)
    names = ("elastic.py",)
    eventually(lambda: not [p for p in shared.processes() if any(n in " ".join(p.cmdline()) for n in names)])


def test_a_policy_is_changed_under_running_jobs(shared):
    shared.shoal("policy", "set", "fifo", code=0)
    submit(shared, "a", gpus="1..4")
    await_size(shared, "a", 4)
    submit(shared, "b", gpus="1..4", steps=30)
    waiting = eventually(lambda: (w := shared.json("why", "b"))["reason"] and w)
    assert waiting["job"]["state"] == "pending"
    assert [ahead["name"] for ahead in waiting["ahead"]] == ["a"]
    shared.shoal("policy", "set", "max-min", code=0)
    await_size(shared, "a", 2)
    shared.shoal("wait", "b", "--timeout", "60s", code=0, timeout=90)
    assert shared.json("show", "a")["restarts"] == 0


def test_a_job_paused_as_it_starts_survives_a_change_of_policy_and_can_be_cancelled(shared):
    submit(shared, "a", gpus="1..4")
    shared.shoal("pause", "a", code=0)
    shared.shoal("policy", "set", "afs-l", code=0)
    shared.shoal("run", "--name", "other", "--gpus", "4", "--", "true", code=0)
    job = shared.json("show", "a")
    assert job["state"] == "paused", job
    assert job["reason"]["code"] == "Held"
    assert shared.json("status")["policy"] == "afs-l", "no decision failed: fifo did not have to take over"
    shared.shoal("resume", "a", code=0)
    shared.shoal("wait", "a", "--for", "running", "--timeout", "60s", code=0, timeout=90)
    shared.shoal("pause", "a", code=0)
    shared.shoal("policy", "set", "max-min", code=0)
    shared.shoal("cancel", "a", "-y", "--grace", "1s", code=0)
    shared.shoal("wait", "a", "--timeout", "30s", code=103)
    eventually(lambda: shared.json("status")["used_gpus"] == 0)
    assert not [w for w in shared.json("status")["warnings"] if "failed" in w]


def test_a_job_saves_its_state_when_it_is_asked_to(shared):
    submit(shared, "a", gpus="1..2")
    await_size(shared, "a", 2)
    eventually(lambda: shared.json("show", "a")["step"])
    shared.shoal("checkpoint", "a", code=0)
    eventually(lambda: shared.json("show", "a")["checkpoint_at"])
    found = shared.json("profile", "a")
    assert [p["gpus"] for p in found["points"]] == [1, 2]
    assert "GPUS" in shared.shoal("profile", "a", "--plot", code=0).stdout


def test_a_script_that_raises_fails_the_job_with_its_last_line(shared, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import shoal.torch\nshoal.torch.init()\nraise ValueError('no such dataset')\n")
    done = shared.shoal("run", "--name", "broken", "--gpus", "1..2", "--", sys.executable, script, code=100)
    assert "no such dataset" in done.stderr, "the reason is told to who waits"
    assert "no such dataset" in shared.shoal("logs", "broken").stdout
    assert "no such dataset" in shared.json("show", "broken")["message"]


def test_a_script_that_cannot_be_found_fails_the_job_and_is_named(shared, tmp_path):
    missing = tmp_path / "missing.py"
    done = shared.shoal("run", "--name", "lost", "--gpus", "1..2", "--", sys.executable, missing, code=100)
    assert "missing.py" in done.stdout + done.stderr
    assert shared.json("show", "lost")["state"] == "failed"
    eventually(lambda: shared.json("status")["used_gpus"] == 0)
