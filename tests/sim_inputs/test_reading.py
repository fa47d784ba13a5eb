"""The fast reader against the standard csv module, and against whatever bytes may come."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.cluster import Cluster
from shoal.core.errors import InputError
from shoal.core.job import Kind
from shoal.core.profile import Profile
from shoal.sim.inputs import cluster_with_users_of, read_cluster, read_jobs, read_profiles

PROFILES = {
    "alpha": Profile.of("alpha", {1: 1.0, 8: 0.2}),
    "be,ta": Profile.of("be,ta", {1: 1.0, 16: 0.2}),
}
CLUSTER = Cluster.pool(12)
REQUIRED = ["submit_s", "model", "iterations", "requested_gpus", "max_gpus"]
OPTIONAL = ["job", "user", "min_gpus", "gpu_types", "kind", "weight"]
quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[str], list[dict[str, str]]]:
    """The columns in any order, and rows that are all right."""
    columns = draw(st.permutations(REQUIRED + draw(st.lists(st.sampled_from(OPTIONAL), unique=True))))
    rows, submit_s = [], 0.0
    for number in range(draw(st.integers(1, 12))):
        submit_s += draw(st.integers(0, 1000)) / 8
        least = draw(st.integers(1, 4))
        requested = draw(st.integers(least, 8))
        values = {
            "submit_s": repr(submit_s),
            "model": draw(st.sampled_from(sorted(PROFILES))),
            "iterations": repr(draw(st.floats(1e-3, 1e9))),
            "requested_gpus": str(requested),
            "max_gpus": str(draw(st.integers(requested, 100))),
            "job": draw(st.sampled_from(["", f'the "{number}" one', f"two\nlines {number}"])),
            "user": draw(st.sampled_from(["", "ada", "bob, jr"])),
            "min_gpus": draw(st.sampled_from(["", str(least)])),
            "gpu_types": draw(st.sampled_from(["", "gpu", "gpu|gpu"])),
            "kind": draw(st.sampled_from(["", *Kind])),
            "weight": draw(st.sampled_from(["", "2.5"])),
        }
        rows.append({name: values[name] for name in columns})
    return columns, rows


def written(columns: list[str], rows: list[dict[str, str]], newline: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator=newline)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@quick
@given(trace=traces(), newline=st.sampled_from(["\n", "\r\n"]))
def test_the_values_are_those_the_csv_module_reads(tmp_path, trace, newline):
    columns, rows = trace
    path = tmp_path / "jobs.csv"
    path.write_text(written(columns, rows, newline), newline="")
    jobs = read_jobs(path, PROFILES, CLUSTER)
    assert len(jobs) == len(rows)
    for number, (job, row) in enumerate(zip(jobs, rows), 1):
        top = {"alpha": 8, "be,ta": 12}[row["model"]]
        assert (job.submit_s, job.model, job.iterations) == (
            float(row["submit_s"]), row["model"], float(row["iterations"]),
        )  # fmt: skip
        assert job.requested_gpus == int(row["requested_gpus"])
        assert (job.gpus.min, job.gpus.max) == (
            int(row.get("min_gpus") or 1),
            min(int(row["max_gpus"]), top),
        )
        assert job.name == (row.get("job") or f"job{number}")
        assert job.user == (row.get("user") or "default")
        assert job.kind == Kind(row.get("kind") or "all-reduce")
        assert job.weight == float(row.get("weight") or 1)
        assert job.gpu_types == tuple(filter(None, row.get("gpu_types", "").split("|")))
    assert [u.name for u in cluster_with_users_of(CLUSTER, jobs).users] == list(
        dict.fromkeys(job.user for job in jobs)
    )


@quick
@given(trace=traces(), data=st.data())
def test_one_spoilt_value_is_found_where_it_stands(tmp_path, trace, data):
    columns, rows = trace
    row = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from([c for c in columns if c not in ("job", "user")]))
    before = written(columns, rows[:row], "\n")
    rows[row][field] = {"submit_s": "-1", "model": "gamma"}.get(field, "wrong")
    path = tmp_path / "jobs.csv"
    path.write_text(written(columns, rows, "\n"))
    with pytest.raises(InputError) as caught:
        read_jobs(path, PROFILES, CLUSTER)
    assert (caught.value.line, caught.value.field) == (before.count("\n") + 1, field)


VALID = {
    read_jobs: b'submit_s,model,iterations,requested_gpus,max_gpus,user\n0,alpha,9,1,8,a\n1,"be,ta",2,2,4,b',
    read_profiles: b"model,gpus,seconds_per_iteration,gpu_type,nodes\na,1,0.5,,\na,2,0.3,v100,1\n",
    read_cluster: b"nodes:\n  - {count: 2, gpus: 4, type: v100, rack: r}\nusers:\n  - {name: a, tickets: 2}",
}
#: What breaks parsers: separators, quotation marks, ends, signs, and other words of the formats.
PIECES = [
    b"", b",", b'"', b"\n", b"\r", b"\0", b"-", b"e9", b"nan", b"inf", b"1e400", b"{", b"]", b"&a ", b"*a",
    b": ", b"\t", b"\xff", b"\xef\xbb\xbf", b"0x10", b"true", b"!!binary ", b"? ", b"1_0",
    b"\x0b", "\u2028".encode(), b"\\n",
]  # fmt: skip


@pytest.mark.parametrize("read", VALID, ids=lambda read: read.__name__)
@quick
@given(data=st.data())
def test_any_damage_is_either_harmless_or_one_clear_line(tmp_path, read, data):
    path = tmp_path / "input"
    content = bytearray(VALID[read])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 5))
        content[at : at + cut] = data.draw(st.sampled_from(PIECES) | st.binary(max_size=3))
    path.write_bytes(content)
    said = complaint(read, path)  # any other exception fails the test
    assert said is None or (said.startswith(str(path)) and len(said.splitlines()) == 1)


def complaint(read: object, path: Path) -> str | None:
    try:
        read_one(read, path)
    except InputError as error:
        return str(error)
    return None


def read_one(read: object, path: Path) -> None:
    if read is read_jobs:
        read_jobs(path, PROFILES, CLUSTER)
    else:
        read(path)  # type: ignore[operator]


def test_profiles_of_types_and_nodes_and_both_interpolations(tmp_path):
    path = tmp_path / "profiles.csv"
    path.write_text(
        "model,gpus,seconds_per_iteration,gpu_type,nodes\n"
        "net,2,1.0,,\nnet,4,0.5,,\nnet,2,0.8,v100,1\nnet,2,1.6,v100,2\n"
    )
    net = read_profiles(path)["net"]
    assert net.curve("k80").min_gpus == 2
    assert net.curve("k80").speed[3] == pytest.approx(1 / 0.75)
    assert net.speed("v100", 2) == pytest.approx(1.25)
    assert net.speed("v100", 2, nodes=2) == pytest.approx(0.625)
    assert read_profiles(path, "throughput")["net"].curve("k80").speed[3] == pytest.approx(1.5)


def test_a_cluster_of_groups_with_names_places_and_users(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes:\n"
        "  - {count: 2, gpus: 8, type: 4090, rack: 1, domain: east}\n"
        "  - {gpus: 4, name: lone}\n"
        "  - {count: 2, gpus: 1, type: v100, name: small}\n"
        "users: {ada: 2, bob: 0.5}\n"
    )
    cluster = read_cluster(path)
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "lone", "small0", "small1"]
    assert cluster.gpu_types == ("4090", "gpu", "v100")
    assert (cluster.nodes[1].rack, cluster.nodes[1].domain) == ("1", "east")
    assert [(user.name, user.tickets) for user in cluster.users] == [("ada", 2.0), ("bob", 0.5)]
    assert not cluster.pooled
    path.write_text("nodes:\n- gpus: 4\nusers:\n- {name: ada, tickets: 3}\n- bob\n")
    assert [(user.name, user.tickets) for user in read_cluster(path).users] == [("ada", 3.0), ("bob", 1.0)]
