"""The environment of a job: what is passed on, what is refused, and which scripts are live."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.spec_options import from_command
from shoal.client import jobfile
from shoal.client.jobfile import JobFileError
from shoal.client.scripts import uses_runtime
from shoal.client.shell import whole_environment
from shoal.torch.worker import Identity


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "SHOAL_CONTROL", "RANK", "MASTER_PORT", "PET_NNODES"]
)
@pytest.mark.parametrize("field", ["env", "secrets"])
def test_a_job_cannot_set_what_the_executor_sets(name: str, field: str):
    with pytest.raises(JobFileError, match=f"{field}: {name} is set by Shoal and cannot be changed"):
        from_command(["train"], **{field: {name: "1"}})


def test_settings_of_the_runtime_may_be_set():
    assert from_command(["train"], env={"SHOAL_CHECKED": "1"}).env == {"SHOAL_CHECKED": "1"}


def test_env_all_passes_on_what_means_something_elsewhere_and_hides_secrets(monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "LR": "0.1", "WANDB_API_KEY": "k", "CUDA_VISIBLE_DEVICES": "3", "SHOAL_HOME": "/h", "SSH_TTY": "t",
        "RANK": "1", "PWD": "/",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    env, secrets = whole_environment()
    assert env["LR"] == "0.1"
    assert "PATH" in env
    assert secrets["WANDB_API_KEY"] == "k"
    assert not {"CUDA_VISIBLE_DEVICES", "SHOAL_HOME", "SSH_TTY", "RANK", "PWD", "HOME"} & {*env, *secrets}


def test_env_from_reads_files_next_to_the_job_file_and_env_wins(tmp_path: Path):
    (tmp_path / "my.env").write_text(
        "# a comment\nLR=0.1\nexport NAME='x y'\n\nDEPTH = 3\nHF_TOKEN=t\nMY_TOKEN=u\n"
    )
    (tmp_path / "job.yaml").write_text(
        "command: train\nenv_from: my.env\nenv:\n  LR: 0.2\n  MY_TOKEN: shown\n"
    )
    spec = jobfile.job_spec(jobfile.read(tmp_path / "job.yaml"))
    assert spec.env == {"LR": "0.2", "NAME": "x y", "DEPTH": "3", "MY_TOKEN": "shown"}
    assert spec.secrets == {"HF_TOKEN": "t"}, "as with --env-all"


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("missing.env", None, r"job.yaml:2:11: env_from: cannot read .*missing.env: No such file"),
        ("bad.env", "LR 0.1\n", r"env_from: .*bad.env:1: write NAME=value"),
        ("set.env", "SHOAL_JOB=7\n", r"env: SHOAL_JOB is set by Shoal"),
        ("{}", None, r"env_from: write `all`, a file with lines NAME=value"),
    ],
)
def test_a_wrong_env_from_is_one_line(tmp_path: Path, source: str, content: str | None, message: str):
    if content is not None:
        (tmp_path / source).write_text(content)
    (tmp_path / "job.yaml").write_text(f"command: train\nenv_from: {source}\n")
    with pytest.raises(JobFileError, match=message):
        jobfile.job_spec(jobfile.read(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("command", "script", "live"),
    [
        (["python", "train.py"], "import shoal.torch as shoal", True),
        (["/opt/bin/python3.12", "-u", "-X", "dev", "train.py", "--x"], "import shoal.torch", True),
        (["python3", "-m", "train"], "def main():\n    from shoal.torch import init", True),
        (["python", "train.py"], "from shoal import torch", True),
        (["python", "train.py"], "from shoal.integrations.transformers import ElasticTrainer", True),
        (["python", "train.py"], "import torch  # shoal.torch", False),
        (["python", "train.py"], "x = 'import shoal.torch'", False),
        (["python", "train.py"], "not python (", False),
        (["python", "-c", "import shoal.torch"], "import shoal.torch", False),
        (["torchrun", "train.py"], "import shoal.torch", False),
        (["python"], "import shoal.torch", False),
    ],
)
def test_a_script_that_uses_the_runtime_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], script: str, live: bool
):
    (tmp_path / "train.py").write_text(script)
    assert uses_runtime(command, tmp_path) is live
    monkeypatch.chdir(tmp_path)
    assert from_command(command, gpus="3").effective_resize == ("live" if live else "never")
    assert from_command(command, gpus="3", resize="never").effective_resize == "never"


def test_the_runtime_never_trains_alone_in_a_job_of_several_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_JOB", "7")
    assert Identity.from_environment() is None, "one GPU: a plain process"
    for name in ("WORLD_SIZE", "SHOAL_GPUS", "SHOAL_NODES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            with pytest.raises(RuntimeError, match="every process would train alone"):
                Identity.from_environment()
