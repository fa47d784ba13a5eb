"""`--placement` as a person gives it to `shoal sim run` and `compare`."""

from __future__ import annotations

import json

import pytest

from shoal.cli.main import main


@pytest.fixture
def files(tmp_path):
    """Three jobs of two GPUs on two nodes of three: the last must span both, at a third of the speed."""
    (tmp_path / "profiles.csv").write_text(
        "model,gpus,seconds_per_iteration,nodes\nm,1,2.0,1\nm,2,1.0,1\nm,2,3.0,2\n"
    )
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {count: 2, gpus: 3}\n")
    head = "submit_s,model,iterations,requested_gpus,max_gpus,min_gpus\n"
    (tmp_path / "jobs.csv").write_text(head + "0,m,100,2,2,2\n" * 3)
    return tmp_path


def shoal(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def inputs(files):
    return [files / "jobs.csv", "-p", files / "profiles.csv", "-c", files / "cluster.yaml"]


def test_a_run_tells_its_placement_and_how_broken_up_the_cluster_was(files, capsys):
    code, out, _ = shoal(
        capsys, "sim", "run", *inputs(files), "--policy", "fifo", "--placement", "moving:horizon_s=900", "-o", "json"
    )  # fmt: skip
    figures = json.loads(out)
    assert code == 0
    assert figures["placement"] == "moving:horizon_s=900"
    assert figures["moves"] == 1
    # From 100 on the last job has two GPUs of one node: of the 1 and 3 that are free, half serve a job of two.
    assert figures["fragmentation"] == {"2": pytest.approx(0.5)}
    assert figures["makespan_s"] == pytest.approx(100 + 200 / 3)


def test_compare_puts_placements_side_by_side(files, capsys):
    code, out, _ = shoal(
        capsys, "sim", "compare", *inputs(files), "--policies", "fifo", "--placement", "auto,moving", "-o", "json",
        "--workers", "1",
    )  # fmt: skip
    items = {item["label"]: item["makespan_s"] for item in json.loads(out)["items"]}
    assert code == 0
    assert items == pytest.approx({"fifo / auto": 300.0, "fifo / moving": 100 + 200 / 3})


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["run", "--placement", "mooving"],
            "shoal: there is no placement 'mooving'; did you mean 'moving'?\n",
        ),
        (["run", "--placement", "moving:horizon=1"], "has no option 'horizon'; did you mean 'horizon_s'?"),
        (["compare", "--placement", "auto,liqid"], "there is no placement 'liqid'; did you mean 'liquid'?"),
        (["compare", "--placement", ","], "name at least one each of --costs, --knowledge and --placement"),
        (["run", "--share"], "--needs FILE"),
        (["run", "--servers", "nowhere"], "'nowhere' is not one of 'beside', 'apart'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(files, capsys, args, told):
    code, out, err = shoal(capsys, "sim", args[0], *inputs(files), *args[1:])
    assert code == 2
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_a_pool_has_no_nodes_to_place_on(files, capsys):
    code, _, err = shoal(
        capsys, "sim", "run", *inputs(files)[:3], "--gpus", 4, "--placement", "liquid"
    )  # fmt: skip
    assert code == 2
    assert "needs nodes" in err


def test_sharing_needs_what_jobs_use_and_then_works(files, capsys):
    (files / "needs.csv").write_text("model,gpu_util,gpu_mem_mb\nm,40,2000\n")
    (files / "jobs.csv").write_text(
        "submit_s,model,iterations,requested_gpus,max_gpus\n" + "0,m,100,1,1\n" * 8
    )
    run = ["sim", "run", *inputs(files), "--policy", "fifo", "-o", "json", "--needs", files / "needs.csv"]
    alone = json.loads(shoal(capsys, *run)[1])
    shared = json.loads(shoal(capsys, *run, "--share")[1])
    # Both guests join the first GPU, which three then share at 1/1.2 of their speed until the others end at 200.
    assert alone["makespan_s"] == 400.0
    assert shared["makespan_s"] == pytest.approx(200 + (200 - 200 / 1.2))
    assert shared["sharing"]["guests"] == 2


def test_measured_placements_become_profiles_by_which_a_run_is_decided(files, capsys):
    (files / "placements.csv").write_text("placement,local_bsz,step_time\n1,8,2.0\n2,8,2.5\n11,8,7.5\n")
    code, _, err = shoal(
        capsys, "sim", "profile", f"m={files / 'placements.csv'}:16", "-o", files / "profiles.csv"
    )
    assert code == 0
    assert err.splitlines() == ["m: 3 points, up to 2 GPUs and 2 nodes"]
    rows = (files / "profiles.csv").read_text().splitlines()
    assert rows == [
        "model,gpus,seconds_per_iteration,nodes", "m,1,4.000000,1", "m,2,2.500000,1", "m,2,7.500000,2"
    ]  # fmt: skip
    code, out, _ = shoal(capsys, "sim", "run", *inputs(files), "--policy", "fifo", "-o", "json")
    assert json.loads(out)["makespan_s"] == pytest.approx(750.0), "the third job spans both nodes"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("m=placements.csv", "write MODEL=FILE:BATCH"),
        ("m=placements.csv:many", "'many' is not a global batch"),
        ("m=nowhere.csv:16", "nowhere.csv: there is no such file"),
        ("m=bad.csv:16", "bad.csv:2"),
        ("m=placements.csv:1", "no placement of 'm' was measured near a global batch of 1"),
    ],
)
def test_mistakes_in_measured_placements_are_told_in_a_line(files, capsys, monkeypatch, word, why):
    monkeypatch.chdir(files)
    (files / "placements.csv").write_text("placement,local_bsz,step_time\n1,8,2.0\n")
    (files / "bad.csv").write_text("placement,local_bsz,step_time\n2+2,8,2.0\n")
    code, _, err = shoal(capsys, "sim", "profile", word, "-o", "out.csv")
    assert code != 0
    assert why in err
    assert len(err.splitlines()) == 1
    assert not (files / "out.csv").exists()


def test_a_placement_that_can_change_no_speed_is_told_in_a_line(files, capsys):
    said = "no profile gives speed by nodes"
    _, _, err = shoal(capsys, "sim", "run", *inputs(files), "--policy", "fifo", "--placement", "moving")
    assert said not in err
    (files / "profiles.csv").write_text("model,gpus,seconds_per_iteration\nm,1,2.0\nm,2,1.0\n")
    _, _, err = shoal(capsys, "sim", "run", *inputs(files), "--policy", "fifo", "--placement", "moving")
    assert said in err
    _, _, err = shoal(capsys, "sim", "run", *inputs(files), "--policy", "fifo")
    assert said not in err


def test_an_autoscaler_that_can_change_nothing_is_told_in_a_line(files, capsys):
    asked = ["--autoscale", "efficiency:threshold=0.5"]
    _, _, err = shoal(capsys, "sim", "run", *inputs(files), "--policy", "fifo", *asked)
    assert "policy fifo does not resize jobs: the autoscaler has no effect" in err
    _, out, err = shoal(capsys, "sim", "run", *inputs(files), "--policy", "afs-p", *asked, "-o", "json")
    assert "has no effect" not in err
    assert json.loads(out)["autoscaler"]["jobs"] == 3
    code, _, err = shoal(capsys, "sim", "run", *inputs(files), "--autoscale", "speed")
    assert code != 0
    assert "there is no heuristic named speed" in err
