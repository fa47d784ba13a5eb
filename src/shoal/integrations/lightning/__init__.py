"""Lightning on Shoal: `Trainer(strategy=ShoalStrategy())`."""

from __future__ import annotations

try:
    from shoal.integrations.lightning.strategy import ShoalStrategy
except ImportError as error:  # lightning or torch
    raise ImportError(f"{error}: pip install 'shoal[lightning]'") from error

__all__ = ["ShoalStrategy"]
