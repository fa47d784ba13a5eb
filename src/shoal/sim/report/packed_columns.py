"""Columns of numbers and words in a page, small: a hundred thousand jobs and their shares take a few megabytes.

A column is compressed (zlib) and written in base64. Of numbers all lowest bytes come first, then all second ones, and
so on: neighbours are alike then, which takes a quarter less. The page's `unpack` is the way back.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_numbers(values: NDArray[Any], kind: str) -> dict[str, Any]:
    """`kind` is f4 or u4, as numpy names them."""
    flat = np.ascontiguousarray(values, np.dtype(kind).newbyteorder("<"))
    planes = flat.view(np.uint8).reshape(len(flat), flat.itemsize).T
    return {"kind": kind, "data": _squeezed(planes.tobytes())}


def pack_words(values: Sequence[str]) -> dict[str, Any]:
    """Each word once, and which it is."""
    words = {word: i for i, word in enumerate(dict.fromkeys(values))}
    return {
        "kind": "words",
        "words": _squeezed(json.dumps(list(words)).encode()),
        "which": pack_numbers(np.array([words[word] for word in values]), "u4"),
    }


def _squeezed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()
