"""`shoal sim gen` and `shoal sim import` as a person runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.sim_gen import gen
from shoal.cli.sim_import import import_
from shoal.cli.sim_options import restart_costs
from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.sim.costs import Costs
from shoal.sim.inputs import read_jobs, read_profiles
from shoal.sim.runner import Setup
from shoal.sim.runner import run as simulate
from shoal.sim.samples import sample_path

app = typer.Typer()
app.command("gen")(gen)
app.command("import")(import_)

TIRESIAS = "num_gpu,submit_time,duration\n1,0,100\n2,5,200\n"


def run(*args: object) -> str:
    """Run a command; what it says on stderr. Errors come out as they are raised."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return result.stderr


def test_gen_writes_a_trace_that_runs_with_the_sample_profiles(tmp_path):
    out = tmp_path / "jobs.csv"
    said = run("gen", "-o", out, "--jobs", 50, "--users", "ada,ben", "--seed", 1)
    jobs = read_jobs(out, read_profiles(sample_path("profiles.csv")), Cluster.pool(64))
    assert len(jobs) == 50
    assert {job.user for job in jobs} == {"ada", "ben"}
    assert "50  jobs written" in said
    again = tmp_path / "again.csv"
    run("gen", "-o", again, "--jobs", 50, "--users", "ada,ben", "--seed", 1)
    assert out.read_bytes() == again.read_bytes()


def test_a_job_takes_the_time_that_its_trace_says(tmp_path):
    """Whatever types the profiles tell apart: what import and gen reckon with is what a run reckons with."""
    trace, out = tmp_path / "trace.csv", tmp_path / "jobs.csv"
    trace.write_text(TIRESIAS)
    run("import", "tiresias", trace, "-o", out)
    setup = Setup(out, sample_path("profiles.csv"), "fifo", gpus=8)
    record = simulate(setup).record
    took_s = [finish - job.submit_s for finish, job in zip(record.finish_s, record.jobs)]
    assert took_s == pytest.approx([100, 200], rel=1e-6)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--sizes", "1=2"], "--sizes"),
        (["--jobs", 0], "at least one job"),
        (["--users", 0], "--users"),
        (["--seed", -1], "seed"),
        (["--load", "inf"], "load"),
        (["--profiles", "nowhere.csv"], "no such file"),
        (["--gpu-type", "tpu", "--profiles", "typed.csv"], "'tpu'"),
    ],
)
def test_gen_with_a_wrong_wish_writes_nothing(tmp_path, monkeypatch, args, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typed.csv").write_text("model,gpus,seconds_per_iteration,gpu_type\nnet,1,1,v100\n")
    with pytest.raises(ShoalError, match=part):
        run("gen", "-o", "jobs.csv", *args)
    assert [path.name for path in tmp_path.iterdir()] == ["typed.csv"]


def test_import_says_what_it_left_out(tmp_path):
    trace, out = tmp_path / "trace.csv", tmp_path / "jobs.csv"
    trace.write_text(TIRESIAS + "99,7,200\nmany,8,200\n")
    with pytest.raises(ShoalError, match=r"trace.csv:5: num_gpu: 'many' is not a whole number.*--skip-bad"):
        run("import", "tiresias", trace, "-o", out)
    assert not out.exists()
    said = run("import", "tiresias", trace, "-o", out, "--skip-bad")
    assert len(read_jobs(out, read_profiles(sample_path("profiles.csv")), Cluster.pool(64))) == 2
    assert "left out: asked for more GPUs than any model runs on" in said
    assert "left out: malformed, the first on line 5" in said


def test_import_makes_profiles_of_a_formats_own_throughputs(tmp_path):
    speeds = tmp_path / "speeds"
    speeds.mkdir()
    (speeds / "bert.csv").write_text("global_batch_size,1,2,4\n64,2.0,3.0,\n128,1.0,2.0,4.0\n")
    trace, out, profiles = tmp_path / "trace.csv", tmp_path / "jobs.csv", tmp_path / "profiles.csv"
    header = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n"
    trace.write_text(header + "0,0,1,bert,9,64,2,100\n1,3,1,bert,9,128,4,100\n")
    run("import", "elasticflow", trace, "--throughputs", speeds, "--profiles-out", profiles, "-o", out)
    jobs = read_jobs(out, read_profiles(profiles), Cluster.pool(8))
    assert [(job.model, job.iterations, job.gpus.max) for job in jobs] == [
        ("bert-64", pytest.approx(300), 2),
        ("bert-128", pytest.approx(400), 4),
    ]
    profiles.unlink()
    trace.write_text(header + "0,0,1,bert,9,64,2,x\n")
    with pytest.raises(ShoalError, match="'x' is not a number"):
        run("import", "elasticflow", trace, "--throughputs", speeds, "--profiles-out", profiles, "-o", out)
    assert not profiles.exists()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["tiresia", "trace.csv"], "did you mean 'tiresias'"),
        (["tiresias", "trace.csv", "--profiles-out", "p.csv"], "needs --throughputs"),
        (["tiresias", "trace.csv", "--throughputs", "t", "--profiles-out", "p.csv"], "no throughputs"),
        (["gavel", "trace.csv", "--throughputs", "t"], "needs --profiles-out"),
        (["tiresias", "trace.csv", "--seed", "-1"], "seed"),
        (["tiresias", "trace.csv", "--gpus", "0"], "no job is left"),
    ],
)
def test_import_with_a_wrong_wish_writes_nothing(tmp_path, monkeypatch, args, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(TIRESIAS)
    with pytest.raises(ShoalError, match=part):
        run("import", *args, "-o", "jobs.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_the_commands_import_nothing_heavy_before_they_run():
    code = (
        "import sys, shoal.cli.sim_gen, shoal.cli.sim_import;"
        "print(sorted({'numpy', 'polars', 'scipy', 'numba', 'torch', 'yaml'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_restarts_cost_what_is_said_of_all_models_and_of_some():
    assert restart_costs(None) == {}
    assert restart_costs("12") == {"restart_s": 12.0, "restart_by_model": {}}
    costs = Costs("restart", **restart_costs("20,resnet50=5"))
    assert (costs.restart_of("resnet50"), costs.restart_of("vgg16")) == (5.0, 20.0)
    for wrong in ("soon", "resnet50=", "resnet50=-1", "nan"):
        with pytest.raises(ShoalError, match=r"restart[-_]s"):
            Costs("restart", **restart_costs(wrong))
