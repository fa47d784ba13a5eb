"""The engine of a server and the command of its agents, made from the settings."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shoal.engines.base import AgentCommand, Engine
from shoal.engines.ray import RayEngine
from shoal.engines.slurm import SlurmEngine, SlurmOptions
from shoal.server.engine.settings import EngineSettings

TOKEN_FILE = "join-token"


def make_engine(settings: EngineSettings, home_id: str) -> Engine:
    if settings.kind == "ray":
        return RayEngine(
            home_id, address=settings.ray_address, gpus=settings.gpus, gpu_type=settings.gpu_type
        )
    options = SlurmOptions(
        partition=settings.partition,
        gpus=settings.gpus,
        gpu_type=settings.gpu_type,
        time_s=settings.time_s,
        sbatch_options=settings.sbatch_options,
    )
    return SlurmEngine(home_id, options)


def agent_command(settings: EngineSettings, address: str) -> Callable[[str], AgentCommand]:
    """Make the command of an agent that joins the control plane at `address` with the token it is given.

    The token is in a file that only its owner can read, never in the arguments or the environment.
    """
    python = settings.python or sys.executable
    argv = [python, "-m", "shoal.cli.main", "agent", "--join", address, "--token-file", "{dir}/" + TOKEN_FILE]
    argv += ["--name", "{agent}", "--state", "{state}"]
    argv += ["--gpus", str(settings.virtual_gpus)] if settings.virtual_gpus else []
    return lambda token: AgentCommand(tuple(argv), files={TOKEN_FILE: token.encode()})
