from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Some virtual machines announce matrix tiles but do not allow them: products in bfloat16 end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

pytest.importorskip("torch")

from elastic_lab import Lab

from shoal.executors.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    warm = Zygote()
    assert warm.wait_ready(timeout_s=240)  # torch takes long to import on a busy machine
    yield warm
    warm.close()


@pytest.fixture
def lab(tmp_path: Path, zygote: Zygote) -> Lab:
    return Lab(tmp_path, zygote)
