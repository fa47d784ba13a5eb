"""The tables in docs/elastic.md of what is supported, checked against the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from elastic_lab import QUICK

from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.torch.sharding.versions import VERSIONS, check_version
from shoal.torch.versions import OLDEST, check_oldest
from shoal.wire import events as ev

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "supported.py"
WAYS = ("replicated", "groups", "one set")
#: Features that cannot be tried together with all others.
ALONE = ("several models and optimizers", "an IterableDataset", "torch.compile")


def table(first: str) -> dict[str, list[str]]:
    """First cell -> the other cells of the table in docs/elastic.md whose first heading is `first`."""
    lines = (ROOT / "docs" / "elastic.md").read_text().splitlines()
    begin = lines.index(next(line for line in lines if line.startswith(f"| {first} |")))
    rows = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


FEATURES = table("feature")


def outcome(directory: Path, zygote: Zygote, how: str, features: list[str]) -> ev.JobEvent:
    env = {"HOW": how, "FEATURES": ";".join(features)}
    with LocalJob([str(SCRIPT)], 2, directory=directory, env=env, zygote=zygote, timing=QUICK) as job:
        return job.wait(lambda e: isinstance(e, (ev.JobFinished, ev.JobFailed)), 60)


def columns() -> list[tuple[str, list[str]]]:
    cases = []
    for index, how in enumerate(WAYS):
        works = [name for name, cells in FEATURES.items() if cells[index] == "yes"]
        cases.append((how, [name for name in works if name not in ALONE]))
        cases += [(how, [name]) for name in works if name in ALONE]
    return cases


@pytest.mark.parametrize(("how", "features"), columns(), ids=lambda v: v if isinstance(v, str) else v[0])
def test_what_the_table_says_is_supported_trains(
    tmp_path: Path, zygote: Zygote, how: str, features: list[str]
):
    end = outcome(tmp_path, zygote, how, features)
    assert isinstance(end, ev.JobFinished), (features, end)


REFUSED = [(how, name) for name, cells in FEATURES.items() for how, cell in zip(WAYS, cells) if cell == "no"]


ONE_SHARDED = "make them parts of one module, with one optimizer, or replicate them: job.wrap(models=[a, b]"
#: (feature, whether the model is replicated) -> what the error says.
ADVICE = {
    ("batch norm", False): "use layer or group norm, or a replicated model (job.wrap)",
    ("copies of parameters in job.state", False): "keep whole tensors in it, made on every worker, such as ",
    ("several models and optimizers", False): ONE_SHARDED,
    ("accumulation with several optimizers", True): "use a larger batch_size",
    ("accumulation with several optimizers", False): ONE_SHARDED,
    ("step(closure)", True): "call backward() before it, and step() without one",
    ("step(closure)", False): "call backward() before it, and step() without one",
    ("sparse gradients", True): "use Embedding(sparse=False)",
    ("sparse gradients", False): "use Embedding(sparse=False)",
}


@pytest.mark.parametrize(("how", "feature"), REFUSED)
def test_what_the_table_says_is_not_supported_is_refused_with_advice(
    tmp_path: Path, zygote: Zygote, how: str, feature: str
):
    end = outcome(tmp_path, zygote, how, [feature])
    assert isinstance(end, ev.JobFailed)
    last = end.why.strip().splitlines()[-1]
    assert ADVICE[feature, how == "replicated"] in last


def test_every_cell_of_the_table_says_yes_no_or_that_it_is_not_tested():
    script = SCRIPT.read_text()
    assert len(FEATURES) >= 15
    for name, cells in FEATURES.items():
        assert len(cells) == len(WAYS)
        assert set(cells) <= {"yes", "no", "not tested"}, name
        assert f'"{name}" in FEATURES' in script, f"the script knows nothing of {name!r}"


def test_the_versions_in_the_table_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = {name: cells[0] for name, cells in table("needs").items()}
    assert rows.pop("torch, replicated models") == f"{OLDEST} or newer"
    assert rows.pop("torch, sharded models (FSDP2)") == " or ".join(VERSIONS)
    declared = dict(re.match(r"([a-z-]+)>=(.+)", need).groups() for extra in extras.values() for need in extra
                    if re.match(r"[a-z-]+>=", need))  # fmt: skip
    assert declared["torch"] == OLDEST
    for package, said in rows.items():
        assert said == f"{declared[package]} or newer", package
    assert set(rows) == {"transformers", "accelerate", "lightning", "submitit", "hydra-submitit-launcher"}


def test_other_versions_of_torch_are_refused_with_the_one_to_install():
    check_oldest("2.13.0+cpu")
    check_oldest("3.0.0a0")
    with pytest.raises(ImportError, match=r"pip install 'torch>=2\.6'"):
        check_oldest("2.5.1")
    check_version("2.13.1")
    for unknown in ("2.12.0", "2.14.0"):
        with pytest.raises(RuntimeError, match=r"sharded models need torch 2\.13"):
            check_version(unknown)
