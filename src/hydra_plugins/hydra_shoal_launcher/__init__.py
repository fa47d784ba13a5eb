"""`hydra/launcher=shoal`: each run of a sweep is a Shoal job. Hydra finds this package by its place."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

if find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
    from hydra.core.config_store import ConfigStore
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher

    class ShoalLauncher(BaseSubmititLauncher):
        _EXECUTOR = "shoal"

    @dataclass
    class ShoalQueueConf(BaseQueueConf):
        """Fields of a job file; see docs/frameworks.md."""

        _target_: str = "hydra_plugins.hydra_shoal_launcher.ShoalLauncher"
        #: GPUs of each run: a number, or a range such as 1..4 for a script that uses shoal.torch.
        gpus: Any = None
        resize: str | None = None
        gpu_types: list[str] | None = None
        env: dict[str, str] | None = None
        weight: float | None = None
        max_restarts: int | None = None
        max_num_timeout: int = 0

    ConfigStore.instance().store(
        group="hydra/launcher", name="shoal", node=ShoalQueueConf(), provider="shoal"
    )
