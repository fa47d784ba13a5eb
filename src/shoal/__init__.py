"""Shoal shares a GPU cluster among many deep-learning training jobs, elastically and fairly."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Loaded when they are asked for, so that importing shoal stays cheap.
_LAZY = {"Client": "shoal.client", "ClientError": "shoal.client", "JobSpec": "shoal.server.api.models"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
