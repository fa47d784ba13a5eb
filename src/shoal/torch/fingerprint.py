"""Short digests of values, to compare them between workers at no measurable cost."""

from __future__ import annotations

import hashlib
from typing import Any

from shoal.torch.packing import as_bytes, dumps
from torch import Tensor

SAMPLE = 4096
"""Elements of a large tensor that are compared."""


def fingerprint(value: Any) -> bytes:
    """Equal values have equal fingerprints. Of large tensors it covers evenly spaced elements."""
    sha = hashlib.sha256()
    _add(sha, value)
    return sha.digest()


def _add(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        sha.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        sha.update(as_bytes(flat[:: max(1, flat.numel() // SAMPLE)]))
    elif isinstance(value, dict):
        sha.update(f"dict {len(value)}".encode())
        for key in sorted(value, key=repr):
            sha.update(repr(key).encode())
            _add(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"list {len(value)}".encode())
        for item in value:
            _add(sha, item)
    elif isinstance(value, (set, frozenset)):
        _add(sha, sorted(value, key=repr))
    elif isinstance(value, (bool, int, float, str, bytes)) or value is None:
        sha.update(repr(value).encode())
    else:
        sha.update(dumps(value))


def shown(value: Any) -> str:
    """The value in an error message."""
    if isinstance(value, Tensor) and value.numel() > 8:
        return f"a tensor of {tuple(value.shape)}"
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 60 else text[:57] + "..."
