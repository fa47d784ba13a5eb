"""submitit on a real server: `AutoExecutor(cluster="shoal")`."""

import os
import pickle
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from live_cluster import eventually

submitit = pytest.importorskip("submitit")
cloudpickle = pytest.importorskip("cloudpickle")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # tasks cannot import this file
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def executor(cluster, folder):
    return submitit.AutoExecutor(folder / "%j", cluster="shoal")


def add(a, b):
    print(f"adding {a} and {b}", flush=True)
    return a + b


def fail():
    raise ArithmeticError("this function never works")


def rank():
    import submitit

    found = submitit.JobEnvironment()
    return found.global_rank, found.num_tasks, found.job_id


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.02)
    return os.environ["COLOUR"]


def train():
    """Elastic: the workers of the job train one model. Only rank 0 gives the result."""
    import shoal.torch as shoal
    import torch

    torch.manual_seed(0)
    job = shoal.init()
    model = torch.nn.Linear(2, 1)
    model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(12, 2), torch.ones(12, 1))
    loader = job.loader(data, batch_size=6)
    for _ in job.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return ("main" if job.is_main else "other", job.world_size, job.position.step)


class Counting(submitit.helpers.Checkpointable):
    """Counts its starts; it never ends before the second."""

    def __init__(self, starts=0):
        self.starts = starts

    def __call__(self):
        self.starts += 1
        while self.starts < 2:
            time.sleep(0.02)
        return self.starts


def test_pyproject_registers_what_is_tested_here():
    registered = {e.name: e.value for e in metadata.entry_points(group="submitit") if "shoal" in e.value}
    assert registered == {
        "executor": "shoal.integrations.submitit.executor:ShoalExecutor",
        "job_environment": "shoal.integrations.submitit.environment:ShoalJobEnvironment",
    }
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'{name} = "{value}"' in project for name, value in registered.items())


def test_functions_run_and_give_their_results_errors_and_output(cluster, executor):
    executor.update_parameters(name="a sum", timeout_min=5)
    jobs = executor.map_array(add, [1, 2, 3], [10, 20, 30])
    wrong = executor.submit(fail)
    assert [job.result() for job in jobs] == [11, 22, 33]
    eventually(lambda: [job.get_info()["State"] for job in jobs] == ["COMPLETED"] * 3)
    assert "adding 1 and 10" in jobs[0].stdout()
    assert "submitit INFO" in jobs[0].stdout() + jobs[0].stderr()
    lines = [line["text"] for line in cluster.json("logs", jobs[0].job_id)["items"]]
    assert lines.count("adding 1 and 10") == 1, "the same line is in Shoal's log"
    assert cluster.json("show", jobs[0].job_id)["name"].startswith("a-sum-")
    with pytest.raises(submitit.core.utils.FailedJobError, match="this function never works"):
        wrong.result()
    assert eventually(lambda: wrong.get_info()["State"] == "FAILED")
    assert "ArithmeticError" in wrong.stderr()
    assert pickle.loads(pickle.dumps(jobs[0])).result() == 11


def test_a_job_waits_runs_and_is_cancelled(cluster, executor, tmp_path):
    executor.update_parameters(shoal_gpus=4, shoal_env={"COLOUR": "blue"})
    first = executor.submit(wait_for, str(tmp_path / "go"))
    eventually(lambda: first.get_info()["State"] == "RUNNING")
    executor.update_parameters(shoal_gpus=1)
    second = executor.submit(wait_for, str(tmp_path / "never"))
    assert second.get_info()["State"] == "PENDING"
    assert not second.done(force_check=True)
    (tmp_path / "go").touch()
    assert first.results() == ["blue"] * 4
    eventually(lambda: second.get_info()["State"] == "RUNNING")
    second.cancel()
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="CANCELLED"):
        second.result()


def test_each_task_has_a_gpu_and_its_rank(executor):
    executor.update_parameters(nodes=1, tasks_per_node=3, gpus_per_node=3)
    job = executor.submit(rank)
    assert job.results() == [(i, 3, job.job_id) for i in range(3)]


def test_an_elastic_function_has_one_result_that_of_rank_0(executor):
    pytest.importorskip("torch")
    executor.update_parameters(shoal_gpus=2, shoal_resize="live")
    assert executor.submit(train).result() == ("main", 2, 4)


def test_a_function_that_saves_its_state_continues_after_its_time_is_over(executor):
    executor._executor.update_parameters(timeout_min=0.05)  # AutoExecutor takes whole minutes only
    job = executor.submit(Counting())
    assert job.result() == 2
    assert job.stdout().count("again (2 remaining timeouts)") == 1
    endless = executor.submit(wait_for, "/nonexistent")
    with pytest.raises(submitit.core.utils.FailedJobError, match="timed-out"):
        endless.result()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"gpus_per_node": 2}, "with gpus_per_node=2 set tasks_per_node=2, not 1"),
        ({"shoal_gpus": "4..1"}, "shoal_gpus: min 4 is above max 1"),
        ({"shoal_weight": -1}, "shoal_weight"),
        ({"shoal_colour": "red"}, "Unknown argument 'colour'"),
    ],
)
def test_parameters_that_no_job_can_have_are_refused_where_they_are_given(executor, parameters, message):
    with pytest.raises((ValueError, NameError), match=message):
        executor.update_parameters(**parameters)
    assert executor.submit(add, 1, 1).result() == 2


def test_memory_and_cores_are_not_silently_ignored(executor):
    with pytest.warns(UserWarning, match="mem_gb is ignored"):
        executor.update_parameters(mem_gb=4)


def test_without_a_server_the_executor_says_how_to_start_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "nothing"))
    with pytest.raises(Exception, match=r"no server runs on .*; start one with `shoal up`"):
        submitit.AutoExecutor(tmp_path, cluster="shoal")
