"""AFS' comparison and CoDDL's thrashing experiment come out the way the paper says, and say so."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.sim.inputs import read_profiles
from shoal.sim.papers import afs
from shoal.sim.samples import sample_path


@pytest.fixture(scope="module")
def result():
    return afs.run(seed=0, quick=True)


def test_afs_beats_its_baselines_on_every_trace(result):
    for claim in result["claims"]:
        assert min(claim["ratio"].values()) > 1.1, claim
        assert claim["most"] == max(claim["ratio"].values())


def test_efficiency_and_shortness_together_beat_either_alone(result):
    for trace in result["traces"]:
        jct = {p: v["avg_jct_s"] for p, v in trace["policies"].items()}
        assert jct["afs-l"] <= min(jct["max-min"], jct["optimus"], jct["srtf"]), trace["trace"]


def test_the_explanation_agrees_with_the_table_also_of_a_quick_run(result):
    """On the short traces of a quick run AFS-P is ahead of Themis everywhere; the text must not say otherwise."""
    claim = next(c for c in result["claims"] if c["over"] == "themis")
    assert claim["ratio"][afs.SHORT_BURSTS] > 1
    assert f"ahead of Themis on short bursts here ({claim['ratio'][afs.SHORT_BURSTS]:.2f}x)" in result["why"]
    traces = [dict(t) for t in result["traces"]]
    for t in traces:
        if t["trace"] == afs.SHORT_BURSTS:
            slower = {**t["policies"]["afs-p"], "avg_jct_s": 2 * t["policies"]["themis"]["avg_jct_s"]}
            t["policies"] = {**t["policies"], "afs-p": slower}
    assert "AFS-P loses to Themis on short bursts (0.50x)" in afs.why(traces, result["share_changes"])
    idle = result["share_changes"]["ratio"][afs.IDLE].values()
    assert f"{min(idle):.1f} to {max(idle):.1f} times as many here" in result["why"]


def test_without_contention_all_policies_that_do_not_resize_are_alike(result):
    idle = next(t for t in result["traces"] if t["trace"] == "idle")["policies"]
    jct = [idle[p]["avg_jct_s"] for p in afs.NON_ELASTIC]
    assert max(jct) == pytest.approx(min(jct), rel=0.02)


def test_elastic_policies_change_shares_more_often(result):
    changes = result["share_changes"]
    assert min(r for by_policy in changes["ratio"].values() for r in by_policy.values()) > 1
    assert changes["average"] < changes["most"]


def test_stopping_and_restarting_thrashes_and_concurrent_reconfiguration_does_not(result):
    none, restart, concurrent = (result["thrashing"]["costs"][k] for k in ("none", "restart", "concurrent"))
    for figure in ("avg_jct_s", "job_jct_s"):
        assert none[figure] <= concurrent[figure] < restart[figure]
        # Concurrent reconfiguration loses less than half of what restarting does.
        assert concurrent[figure] - none[figure] < 0.5 * (restart[figure] - none[figure])
    assert concurrent["job_paused_s"] < 0.1 * restart["job_paused_s"]


def test_the_job_is_further_at_every_time_when_it_is_not_restarted(result):
    restart, concurrent = (result["thrashing"]["costs"][k] for k in ("restart", "concurrent"))
    at = np.linspace(0.1, 1, 30) * concurrent["job_jct_s"]
    slow, quick = (np.interp(at, one["time_s"], one["done"]) for one in (restart, concurrent))
    assert np.all(quick > slow)
    assert quick[-1] == pytest.approx(1.0, abs=1e-3)  # times are in tenths of a second


def test_the_same_seed_gives_the_same_experiment():
    profiles = read_profiles(sample_path("profiles.csv"))
    first, again, other = (afs.thrashing(profiles, 40, seed) for seed in (3, 3, 4))
    assert first == again != other


def test_the_table_has_the_papers_figures_next_to_ours(result):
    text = afs.render(result)
    for theirs in ("2.67x", "3.11x", "6.3x", "22x"):
        assert theirs in text
    for claim in result["claims"]:
        assert f"{claim['most']:.2f}x" in text
    assert result["why"] in text
    assert max(map(len, text.removesuffix(result["why"]).splitlines())) < 150
    json.dumps(result, allow_nan=False)


def test_the_plot_is_drawn(result, tmp_path):
    afs.plot(result, tmp_path / "afs.svg")
    text = (tmp_path / "afs.svg").read_text()
    assert "<svg" in text
    assert len(text) > 10_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["asf"], "did you mean 'afs'?"),
        (["nothing-like-it"], "known: afs, elasticity, gandiva-fair, liquid, optimus"),
        (["afs", "--plot", "figure.doc"], ".png, .svg or .pdf"),
        (["afs", "--plot", "nowhere/figure.png"], "there is no directory nowhere"),
        (["afs", "-o", "xml"], "'xml' is not one of 'table', 'json'"),
    ],
)
def test_mistakes_are_found_before_the_experiment(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["sim", "paper", *words])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert says in err
    assert out == ""
    assert err.count("\n") == 1


def test_the_command_prints_json_and_draws(capsys, tmp_path, monkeypatch, result):
    monkeypatch.setattr(afs, "run", lambda seed, quick: {**result, "seed": seed})
    with pytest.raises(SystemExit) as stop:
        main(
            ["sim", "paper", "afs", "--quick", "--seed", "5", "-o", "json", "--plot", str(tmp_path / "a.png")]
        )
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 5
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
