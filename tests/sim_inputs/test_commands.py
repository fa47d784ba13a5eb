"""`shoal sim gen` and `shoal sim import` as a person runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click import Group
from click.testing import CliRunner

from shoal.cli.sim_compare import compare as sim_compare
from shoal.cli.sim_gen import gen
from shoal.cli.sim_import import import_
from shoal.cli.sim_options import restart_costs
from shoal.cli.sim_profile import profile
from shoal.cli.sim_run import run as sim_run
from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.sim.costs import Costs
from shoal.sim.inputs import read_jobs, read_profiles
from shoal.sim.runner import Setup
from shoal.sim.runner import run as simulate
from shoal.sim.samples import sample_path

app = Group(commands=[gen, import_, profile, sim_run, sim_compare])

ELASTICFLOW = ["elasticflow", "ef.csv", "--throughputs", "speeds"]
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
        (["--jobs", 0], "jobs: a trace needs at least one"),
        (["--users", 0], "--users"),
        (["--users", "ada,,ben"], "--users: 'ada,,ben' has an empty name"),
        (["--sizes", "1:0.5,1:0.5"], "--sizes: '1:0.5,1:0.5' gives a size twice"),
        (["--sizes", "1:0,2:0"], "sizes: all shares are 0"),
        (["--seed", -1], "seed"),
        (["--load", "inf"], "load"),
        (["--load", "1e-300"], "load: give 1e-06 to 1000"),
        (["--profiles", "nowhere.csv"], "no such file"),
        (["--gpu-type", "tpu", "--profiles", "typed.csv"], "--gpu-type tpu: no profile"),
        (["--gpu-type", "tpu", "--profiles", "plain.csv"], "--gpu-type tpu: the profiles do not distinguish"),
        (["-o", "jobs.txt"], "jobs.txt: a table is written as csv or Parquet"),
        (["-o", "jobs"], "end its name with .csv or .parquet"),
        (["-o", "typed.csv", "--profiles", "typed.csv"], "typed.csv is read by this command"),
        (["-o", "link.csv", "--profiles", "typed.csv"], "link.csv is read by this command"),
    ],
)
def test_gen_with_a_wrong_wish_writes_nothing(tmp_path, monkeypatch, args, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typed.csv").write_text("model,gpus,seconds_per_iteration,gpu_type\nnet,1,1,v100\n")
    (tmp_path / "plain.csv").write_text("model,gpus,seconds_per_iteration\nnet,1,1\n")
    (tmp_path / "link.csv").symlink_to(tmp_path / "typed.csv")
    before = state_of(tmp_path)
    with pytest.raises(ShoalError, match=part):
        run("gen", "-o", "jobs.csv", *args)
    assert state_of(tmp_path) == before


def state_of(folder):
    """All files below a directory and what is in them."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
        (["tiresias", "trace.csv", "--gpus", "0"], "--gpus: give the largest request to keep"),
        (["tiresias", "trace.csv", "--gpus", "-1"], "--gpus: give the largest request to keep"),
        (["tiresias", "trace.csv", "-o", "trace.csv"], "trace.csv is read by this command"),
        (["tiresias", "trace.csv", "-o", "sub/../trace.csv"], "is read by this command"),
        (["tiresias", "trace.csv", "--profiles", "p.csv", "-o", "p.csv"], "p.csv is read by this command"),
        (["alibaba-pai", "sub", "-o", "sub/pai_job_table.csv"], "is read by this command"),
        (["alibaba-pai", "sub/pai_task_table.csv", "-o", "sub/pai_job_table.csv"], "is read by this command"),
        (["tiresias", "trace.csv", "-o", "jobs.xls"], "jobs.xls: a table is written as csv or Parquet"),
        ([*ELASTICFLOW, "--profiles-out", "new.csv", "-o", "no/where.csv"], "cannot write no/where.csv"),
        ([*ELASTICFLOW, "--profiles-out", "no/where.csv", "-o", "new.csv"], "cannot write no/where.csv"),
        ([*ELASTICFLOW, "--profiles-out", "new.csv", "-o", "new.csv"], "give them different names"),
        ([*ELASTICFLOW, "--profiles-out", "speeds/net.csv"], "net.csv is read by this command"),
        (["tiresias", "trace.csv", "--gpu-type", "zz"], "--gpu-type zz: no profile"),
        (
            ["tiresias", "named.csv", "--profiles", "p.csv"],
            r"named.csv:2: model_name: no profile for model 'nett' in p.csv; did you mean 'net'\?",
        ),
        (
            ["elasticflow", "ef.csv", "--throughputs", "speeds", "--profiles-out", "new.csv"],
            r"ef.csv:2: model_name: no profile for model 'nett' in speeds; did you mean 'net-64'\?",
        ),
    ],
)
def test_import_with_a_wrong_wish_writes_nothing(tmp_path, monkeypatch, args, part):
    monkeypatch.chdir(tmp_path)
    for folder in ("sub", "speeds"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trace.csv").write_text(TIRESIAS)
    (tmp_path / "named.csv").write_text("num_gpu,submit_time,duration,model_name\n1,0,100,nett\n")
    (tmp_path / "ef.csv").write_text(
        "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n0,0,9,nett,9,64,1,20\n"
    )
    (tmp_path / "p.csv").write_text("model,gpus,seconds_per_iteration\nnet,1,1\n")
    (tmp_path / "speeds" / "net.csv").write_text("global_batch_size,1,2\n64,1,2\n")
    (tmp_path / "sub" / "pai_task_table.csv").write_text("ja,tf,1,Terminated,100,100000,600,29,100,V100\n")
    (tmp_path / "sub" / "pai_job_table.csv").write_text("ja,i,ida,T,100,1\n")
    before = state_of(tmp_path)
    with pytest.raises(ShoalError, match=part):
        run("import", "-o", "jobs.csv", *args)
    assert state_of(tmp_path) == before


def test_an_import_can_be_repeated_in_the_directory_of_its_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pai_task_table.csv").write_text("ja,tf,1,Terminated,100,100000,600,29,100,V100\n")
    for _ in range(2):
        assert "1  job written to jobs.csv" in run("import", "alibaba-pai", ".", "-o", "jobs.csv")


@pytest.mark.parametrize("what", ["[/b]", "[red]", ":smile:"])
def test_what_a_file_says_is_shown_as_it_is(tmp_path, what):
    trace = tmp_path / "trace.csv"
    trace.write_text(TIRESIAS + f"{what},7,200\n")
    said = run("import", "tiresias", trace, "-o", tmp_path / "jobs.csv", "--skip-bad")
    assert f"{what!r} is not a whole number" in " ".join(said.split())


def test_the_bad_rows_of_each_pai_table_are_counted_in_the_summary(tmp_path):
    (tmp_path / "pai_task_table.csv").write_text(
        "ja,tf,1,Terminated,100,100000,600,29,100,V100\n"
        "jb,tf,1,Terminated,x,100000,600,29,100,V100\njb,tf,1,Terminated,9,100000,600,29,100,V100\n"
    )
    (tmp_path / "pai_job_table.csv").write_text("ja,i,ida,T,100,1\njb,i,eve,T,then,1\n")
    said = " ".join(run("import", "alibaba-pai", tmp_path, "-o", tmp_path / "o.csv", "--skip-bad").split())
    assert "1 left out: tasks of a job with a malformed task" in said
    assert "1 left out: malformed, the first on line 2: 'x' is not a number of seconds" in said
    assert "1 left out: malformed, the first on line 2 of pai_job_table.csv: 'then' is not a number" in said


def test_profiles_do_not_replace_the_measurements_they_are_made_of(tmp_path):
    path = tmp_path / "placements.csv"
    path.write_text("placement,local_bsz,step_time\n1,8,0.5\n2,4,0.3\n")
    before = state_of(tmp_path)
    for out, part in (("placements.csv", "is read by this command"), ("p.txt", "csv or Parquet")):
        with pytest.raises(ShoalError, match=part):
            run("profile", f"net={path}:8", "-o", tmp_path / out)
    assert state_of(tmp_path) == before


@pytest.mark.parametrize(
    ("batch", "note"),
    [
        (16, None),
        (
            17,
            "net: a batch of 17 is larger than any measured one (at most 16, on 2 GPUs); an iteration "
            "counts as 2 steps",
        ),
        (100_000, "an iteration counts as 6,250 steps there, and as more on fewer GPUs"),
    ],
    ids=["the largest that was measured", "a little more", "far beyond"],
)
def test_a_batch_beyond_the_measured_ones_has_a_note(tmp_path, batch, note):
    (tmp_path / "placements.csv").write_text("placement,local_bsz,step_time\n1,8,1.0\n2,4,0.4\n2,8,0.6\n")
    said = run("profile", f"net={tmp_path / 'placements.csv'}:{batch}", "-o", tmp_path / "p.csv")
    assert ("note:" in said) == (note is not None)
    assert note is None or note in said


def test_a_model_has_one_profile(tmp_path):
    path = tmp_path / "placements.csv"
    path.write_text("placement,local_bsz,step_time\n1,8,1.0\n")
    with pytest.raises(ShoalError, match=r"^net is given twice"):
        run("profile", f"net={path}:8", f"other={path}:8", f"net={path}:16", "-o", tmp_path / "p.csv")
    assert list(tmp_path.iterdir()) == [path]
    run("profile", f"net-8={path}:8", f"net-16={path}:16", "-o", tmp_path / "p.csv")
    assert list(read_profiles(tmp_path / "p.csv")) == ["net-8", "net-16"]


RESTART = ("--costs", "restart", "--restart-s")


@pytest.mark.parametrize(
    ("verb", "args", "part"),
    [
        ("run", ["--per-job", "jobs.csv"], "jobs.csv is read by this command"),
        ("run", ["--per-job", "p.csv"], "p.csv is read by this command"),
        ("run", ["--per-job", "c.yaml", "--cluster", "c.yaml"], "c.yaml is read by this command"),
        ("run", ["--per-job", "rows.doc"], "rows.doc: a table is written as csv or Parquet"),
        ("compare", ["--report", "jobs.csv"], "jobs.csv is read by this command"),
        ("compare", ["--report", "p.csv"], "p.csv is read by this command"),
        ("run", [*RESTART, "30,nett=3"], "no profile in p.csv is of model 'nett'; did you mean 'net'"),
        ("compare", [*RESTART, "30,nett=3"], "no profile in p.csv is of model 'nett'; did you mean 'net'"),
        ("run", [*RESTART, "net=3,net=4"], "'net' is given twice"),
        ("run", [*RESTART, "3,4"], "seconds are given twice"),
        ("run", ["--restart-s", "3"], "--restart-s has no effect without --costs restart"),
        ("run", ["--pause-s", "3", *RESTART, "3"], "--pause-s has no effect without --costs concurrent"),
        ("compare", ["--prepare-s", "3", "--costs", "none,restart"], "--prepare-s has no effect without"),
        ("run", ["--option", "backfill=no", "--option", "backfill=yes"], "backfill is given twice"),
        (
            "run",
            ["-p", "other.csv"],
            "jobs.csv:2: model: no profile for model 'net' in other.csv; did you mean 'nut'",
        ),
        (
            "compare",
            ["-p", "other.csv"],
            "jobs.csv:2: model: no profile for model 'net' in other.csv; did you",
        ),
        ("compare", ["--option", "backfill=no", "--option", "backfill=yes"], "backfill is given twice"),
    ],
)
def test_a_run_with_a_wrong_wish_ends_before_it_starts(tmp_path, monkeypatch, verb, args, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text("submit_s,model,iterations,requested_gpus,max_gpus\n0,net,9,1,1\n")
    (tmp_path / "p.csv").write_text("model,gpus,seconds_per_iteration\nnet,1,1\n")
    (tmp_path / "other.csv").write_text("model,gpus,seconds_per_iteration\nnut,1,1\n")
    (tmp_path / "c.yaml").write_text("nodes:\n  - {gpus: 4}\n")
    before = state_of(tmp_path)
    where = [] if "--cluster" in args else ["--gpus", 4]
    with pytest.raises(ShoalError, match=part):
        run(verb, "jobs.csv", "-p", "p.csv", *where, *args)
    assert state_of(tmp_path) == before


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


def test_a_redirected_stream_is_written_to_and_not_replaced(tmp_path):
    command = [sys.executable, "-m", "shoal.cli.main", "sim", "gen", "--jobs", "3", "-o", "/dev/stdout"]
    out = tmp_path / "jobs.csv"
    with out.open("w") as stdout:
        subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=True)
    assert len(out.read_text().splitlines()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]
