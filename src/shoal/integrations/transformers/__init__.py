"""Hugging Face Transformers on Shoal: `ElasticTrainer` instead of `Trainer`."""

from __future__ import annotations

import re
from importlib import metadata

OLDEST = (5, 3)
"""Of the versions of Transformers. Before it the Trainer has no method that trains one epoch."""

try:
    installed = metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        raise ImportError(f"ElasticTrainer needs Transformers 5.3 or newer, not {installed}")
    from shoal.integrations.transformers.trainer import ElasticTrainer
except ImportError as error:  # transformers, accelerate or torch
    raise ImportError(f"{error}: pip install 'shoal[transformers]'") from error

__all__ = ["ElasticTrainer"]
