"""Hugging Face Transformers on Shoal: `ElasticTrainer` instead of `Trainer`."""

from __future__ import annotations

try:
    from shoal.integrations.transformers.trainer import ElasticTrainer
except ImportError as error:  # transformers, accelerate or torch
    raise ImportError(f"{error}: pip install 'shoal[transformers]'") from error

__all__ = ["ElasticTrainer"]
