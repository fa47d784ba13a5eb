"""The versions of torch with which replicated models can be resized."""

from __future__ import annotations

OLDEST = "2.6"


def check_oldest(version: str) -> None:
    if _parts(version) < _parts(OLDEST):
        raise ImportError(
            f"shoal.torch needs torch {OLDEST} or newer, and this is torch {version}: pip install 'torch>={OLDEST}'"
        )


def _parts(version: str) -> tuple[int, ...]:
    """Major and minor number. An unusual version counts as a new one."""
    numbers = version.split(".")[:2]
    return tuple(int(n) for n in numbers) if all(n.isdigit() for n in numbers) else (10**6,)
