"""`pip install shoal` without extras: the client, the command line and shoal.torch, and nothing of the scheduler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = [
    "numpy",
    "scipy",
    "numba",
    "sklearn",
    "polars",
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "alembic",
    "jinja2",
    "matplotlib",
    "torch",
    "transformers",
    "accelerate",
    "lightning",
    "submitit",
    "hydra",
]


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """A virtual environment with Shoal and its light dependencies; `light(*command)` runs a program of it."""
    base = tmp_path_factory.mktemp("light")
    source = base / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-m", "venv", base / "venv"], check=True)
    python = base / "venv/bin/python"
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    subprocess.run([*install, source], check=True, cwd=base)
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("SHOAL_", "PYTHON"))}

    def run(*command, **variables):
        return subprocess.run(
            [base / "venv/bin" / command[0], *command[1:]],
            capture_output=True,
            text=True,
            env={**outside, "SHOAL_HOME": str(base / "home"), **variables},
            cwd=base,
            timeout=120,
        )

    return run


def importing(module: str) -> list[str]:
    """A command that imports a module and prints which heavy packages came with it."""
    found = f"print([name for name in {HEAVY} if name in sys.modules])"
    return ["python", "-c", f"import sys, {module}; {found}"]


def test_no_heavy_package_is_installed(light):
    listed = light("python", "-m", "pip", "list", "--format=freeze").stdout.lower()
    names = {line.partition("==")[0].replace("-", "_") for line in listed.split()}
    assert "shoal" in names
    assert not names & {*HEAVY, "scikit_learn", "hydra_core"}


@pytest.mark.parametrize(
    "args", [["--help"], ["-h"], ["ps", "--help"], ["up", "--help"], ["sim", "run", "--help"], ["--version"]]
)
def test_help_needs_no_extra(light, args):
    done = light("shoal", *args)
    assert (done.returncode, done.stderr) == (0, "")
    assert "shoal" in done.stdout


def test_version_needs_no_server(light):
    done = light("shoal", "version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("args", [["ps"], ["policy", "get"], ["run", "--", "true"], ["events"]])
def test_a_command_without_a_server_says_how_to_start_one(light, args):
    done = light("shoal", *args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (6, "", 1)
    assert done.stderr.startswith("shoal: no server runs on ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["up"], "shoal up needs the server: pip install 'shoal[server]'"),
        (["sim", "run", "--sample"], "shoal sim run needs the simulator: pip install 'shoal[sim]'"),
        (["sim", "compare", "--sample"], "shoal sim compare needs the simulator: pip install 'shoal[sim]'"),
        (["sim", "gen", "-o", "j.csv"], "shoal sim gen needs the simulator: pip install 'shoal[sim]'"),
        (["sim", "paper", "afs"], "shoal sim paper needs the simulator: pip install 'shoal[sim]'"),
        (
            ["sim", "import", "gavel", "x", "-o", "j.csv"],
            "shoal sim import needs the simulator: pip install 'shoal[sim]'",
        ),
        (
            ["sim", "profile", "m=f:1", "-o", "p.csv"],
            "shoal sim profile needs the simulator: pip install 'shoal[sim]'",
        ),
        (["policy", "ls"], "shoal policy ls needs the server: pip install 'shoal[server]'"),
        (["policy", "show", "fifo"], "shoal policy show needs the server: pip install 'shoal[server]'"),
    ],
)
def test_a_command_whose_extra_is_missing_names_the_extra(light, args, message):
    done = light("shoal", *args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"shoal: {message}\n")


@pytest.mark.parametrize(
    "module",
    ["shoal", "shoal.client", "shoal.cli.commands", "shoal.wire", "hydra_plugins.hydra_shoal_launcher"],
)
def test_light_modules_import_no_heavy_package(light, module):
    done = light(*importing(module))
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_client_and_the_job_model_are_there(light):
    code = "import shoal; shoal.JobSpec(command=['true'], workdir='/'); from shoal.client import Client"
    assert light("python", "-c", code).stderr == ""


def test_the_runtime_without_torch_says_what_to_install(light):
    done = light("python", "-c", "import shoal.torch")
    assert done.stderr.endswith("ImportError: shoal.torch needs PyTorch: pip install torch\n")


TRAIN = """
import sys, warnings
warnings.simplefilter("ignore")  # PyTorch warns that there is no NumPy
import torch
import shoal.torch as shoal

job = shoal.init(checkpoint="checkpoint", seed=3)
model = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
loader = job.loader(data, batch_size=4)
for epoch in job.epochs(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    job.checkpoint()
print("numpy" in sys.modules, epoch)
"""


def test_a_script_trains_and_resumes_with_torch_and_without_numpy(light, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    site = torch_alone(tmp_path / "site")
    for epochs in (1, 3):  # the second run resumes from the checkpoint of the first
        done = light("python", script, str(epochs), PYTHONPATH=str(site))
        assert (done.returncode, done.stdout) == (0, f"False {epochs - 1}\n"), done.stderr


def torch_alone(site: Path) -> Path:
    """A directory with links to torch and what torch requires, and to nothing else that is installed here."""
    site.mkdir()
    open_, seen = ["torch"], set()
    while open_:
        name = open_.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        found = metadata.distribution(name)
        for top in {
            file.parts[0] for file in found.files or () if not file.parts[0].startswith(("..", "__"))
        }:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
        wanted = [text for text in found.requires or () if "extra ==" not in text]
        open_ += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in wanted]
    return site
