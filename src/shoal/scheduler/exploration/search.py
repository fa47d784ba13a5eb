"""Find the most valuable trial."""

from __future__ import annotations

from shoal.scheduler.exploration.by_size import best_by_size
from shoal.scheduler.exploration.by_type import best_by_type
from shoal.scheduler.exploration.candidates import Found, Situation, candidates


def find(s: Situation) -> Found | None:
    """The trial whose value exceeds its cost most, if any does."""
    jobs = candidates(s)
    found = [best_by_size(s, jobs), best_by_type(s, jobs) if len(s.free_gpus) > 1 else None]
    return max((f for f in found if f is not None), key=lambda f: f.surplus_s, default=None)
