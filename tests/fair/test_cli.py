"""Fair sharing on mixed GPUs as a person runs it: tables, JSON, and what is said of mistakes."""

import json
import re
from dataclasses import dataclass

import pytest

from shoal.cli.main import main

CLUSTER = """\
nodes:
  - {count: 1, gpus: 4, type: v100, name: v}
  - {count: 4, gpus: 4, type: k80, name: k}
users:
  slow: 1
  fast: 1
  third: 2
"""
SPEED_UP = {"slow": 1.2, "fast": 6.0, "third": 2.0}
PROFILES = "model,gpu_type,gpus,seconds_per_iteration\n" + "".join(
    f"{model},{gpu_type},{gpus},{1 / gpus / (up if gpu_type == 'v100' else 1)}\n"
    for model, up in SPEED_UP.items()
    for gpu_type in ("v100", "k80")
    for gpus in (1, 2, 4, 8)
)
HEADER = "submit_s,model,iterations,requested_gpus,max_gpus,user,gpu_types\n"
JOBS = [
    f"{k},{user},{4000 * size},{size},8,{user},\n"
    for k in range(5)
    for user in SPEED_UP
    for size in (1, 2, 4)
]
JOBS.sort(key=lambda row: int(row.split(",")[0]))
TRACE = HEADER + "".join(JOBS)


@dataclass
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def shoal(tmp_path, monkeypatch, capsys):
    """Write the files, changed as told, and run `shoal sim run` on them."""

    def run(*args, cluster=CLUSTER, profiles=PROFILES, jobs=TRACE):
        for name, text in (("cluster.yaml", cluster), ("profiles.csv", profiles), ("jobs.csv", jobs)):
            (tmp_path / name).write_text(text)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main(["sim", "run", "jobs.csv", "-p", "profiles.csv", "-c", "cluster.yaml", *args])
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.mark.parametrize("policy", ["gandiva-fair", "fair-afs"])
def test_the_table_shows_the_ledger_and_every_pair_that_trades(shoal, policy):
    result = shoal("--policy", policy)
    assert result.code == 0, result.err
    assert re.search(r"GPU-hours +type +entitled +traded +received +borrowed +lent +off its due", result.out)
    assert re.search(r"^fast +v100 .* \+\d", result.out, re.MULTILINE)  # has won V100s by trading
    assert re.search(r"^fast +[\d.]+ v100 +slow +[\d.]+ k80 +2\.00 ", result.out, re.MULTILINE)
    assert "gains are in GPU-hours" in result.err


def test_the_json_has_the_ledger_and_every_round_of_trades(shoal):
    result = shoal("--policy", "gandiva-fair", "--costs", "suspend", "-o", "json")
    found = json.loads(result.out)
    assert set(found["ledger"]["fast"]["v100"]) == {"entitled", "received", "lent", "borrowed", "traded"}
    for gpu_type in ("v100", "k80"):  # what one wins another has given
        assert sum(user[gpu_type]["traded"] for user in found["ledger"].values()) == pytest.approx(
            0, abs=1e-3
        )
    first = found["trades"][0]
    assert {"time_s", "until_s", "trades"} == set(first)
    traded = [t for r in found["trades"] for t in r["trades"]]
    assert {"buyer", "seller", "fast", "slow", "price", "fast_gpus", "slow_gpus"} <= set(traded[0])
    assert all(t["buyer_gain"] >= -1e-9 and t["seller_gain"] >= -1e-9 for t in traded)
    assert found["migrations"] >= 0


def with_line(number, row):
    lines = [HEADER, *JOBS]
    lines[number - 1] = row + "\n"
    return "".join(lines)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cluster": CLUSTER.replace("slow: 1", "slow: 0")}, "cluster.yaml:5: tickets: must be a positive"),
        ({"cluster": CLUSTER.replace("fast: 1", "fast: -3")}, "cluster.yaml:6: tickets: must be a positive"),
        (
            {"jobs": with_line(2, "0,slow,9,1,8,nobody,")},
            "jobs.csv:2: user: the cluster has no user 'nobody'; known: fast, slow, third",
        ),
        (
            {"jobs": with_line(3, "0,slow,9,1,8,slow,a100")},
            "jobs.csv:3: gpu_types: no node has GPUs of type 'a100'",
        ),
        (
            {"jobs": with_line(4, "0,slow,9,8,8,slow,v100")},
            "jobs.csv:4: requested_gpus: 8 GPUs are more than the cluster has for this job; the largest that "
            "works is 4",
        ),
        (
            {"profiles": re.sub(r"slow,v100,.*\n", "", PROFILES)},
            "jobs.csv:2: model: 'slow' has no profile for GPUs of type v100, which the job may use; measure it "
            "there, or set gpu_types to k80",
        ),
    ],
    ids=["no tickets", "negative tickets", "no such user", "no such type", "gang fits nowhere", "no profile"],
)
def test_a_mistake_is_told_in_one_line_with_file_line_field_and_what_to_change(shoal, changed, said):
    result = shoal("--policy", "gandiva-fair", **changed)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith(f"shoal: {said}")
    assert result.err.count("\n") == 1
