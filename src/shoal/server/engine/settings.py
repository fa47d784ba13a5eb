"""What `shoal up --engine` sets. The store remembers it for the next `shoal up`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from shoal.core.errors import ShoalError
from shoal.engines.capacity import CapacityLimits

DEFAULT_NODES = (1, 8)
ONLY: dict[str, tuple[str, ...]] = {
    "ray": ("ray_address",),
    "slurm": ("partition", "time_s", "sbatch_options"),
}
"""The settings that only one engine knows."""
_OPTION = {"time_s": "--time", "sbatch_options": "--sbatch-option", "nodes": "--nodes", "idle_s": "--idle"}


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["ray", "slurm"]
    #: How many machines to hold, at least and at most.
    nodes: tuple[int, int] = DEFAULT_NODES
    #: How long a machine may be idle before it is returned.
    idle_s: float = 600.0
    #: GPUs of each machine and their type. None: all GPUs of its node, and any type.
    gpus: int | None = None
    gpu_type: str | None = None
    #: The interpreter that runs the agents. None: the server's own, at the same path.
    python: str | None = None
    #: For trying: each machine offers so many GPUs that do not exist. None: the GPUs that it was granted.
    virtual_gpus: int | None = None
    ray_address: str = "auto"
    partition: str | None = None
    time_s: float | None = None
    sbatch_options: tuple[str, ...] = ()

    @property
    def limits(self) -> CapacityLimits:
        return CapacityLimits(*self.nodes, self.idle_s)


def settings_from(saved: Mapping[str, Any] | None, given: Mapping[str, Any] | None) -> EngineSettings | None:
    """The settings in force: those given now, else those of the last start. None: no engine.

    `given` has only what was written on the command line. `{"kind": "none"}` gives the engine up.
    """
    given = dict(given or {})
    if given.get("kind") == "none":
        if len(given) > 1:
            raise ShoalError(f"--engine none takes no {_written(next(k for k in given if k != 'kind'))}")
        return None
    kind = given.get("kind") or (saved or {}).get("kind")
    if kind is None:
        if given:
            raise ShoalError(
                f"{_written(next(iter(given)))} needs an engine: add --engine ray or --engine slurm"
            )
        return None
    for other, names in ONLY.items():
        wrong = next((name for name in names if name in given), None)
        if other != kind and wrong is not None:
            raise ShoalError(f"{_written(wrong)} is for --engine {other}, and this is {kind}")
    kept = dict(saved) if saved is not None and saved.get("kind") == kind else {}
    try:
        found = msgspec.convert({**kept, **given, "kind": kind}, EngineSettings)
        _ = found.limits
    except (msgspec.ValidationError, ValueError) as error:
        raise ShoalError(f"the settings of the engine are wrong: {error}") from None
    return found


def _written(name: str) -> str:
    return _OPTION.get(name, "--" + name.replace("_", "-"))
