from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from elastic_lab import Lab

from shoal.torch.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    warm = Zygote()
    assert warm.wait_ready()
    yield warm
    warm.close()


@pytest.fixture
def lab(tmp_path: Path, zygote: Zygote) -> Lab:
    return Lab(tmp_path, zygote)
