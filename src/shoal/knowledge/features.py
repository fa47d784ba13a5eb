"""A job's features as Liquid (TPDS'21) defines them: its sizes and the flags of its command.

Integers are used as they are; other values become the 32-bit FNV-1a hash of their text. Flags that only say
where a task runs are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence

IGNORED_FLAGS = frozenset(
    {"train_dir", "variable_update", "ps_hosts", "worker_hosts", "task_index", "job_name"}
)

Features = dict[str, int | str]


def fnv1a_32(text: str) -> int:
    """The 32-bit FNV-1a hash of the UTF-8 bytes."""
    value = 0x811C9DC5
    for byte in text.encode(errors="surrogatepass"):
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def flags_of(command: Sequence[str]) -> Features:
    """The `--key=value` and `--key value` flags of a command; a flag with no value is 1."""
    flags: Features = {}
    words = list(command)
    for position, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        key, equals, value = word[2:].partition("=")
        if not equals:
            following = words[position + 1] if position + 1 < len(words) else "--"
            value = "1" if following.startswith("--") else following
        if key and key not in IGNORED_FLAGS:
            flags[key] = _number_or_text(value)
    return flags


def task_features(
    command: Sequence[str], *, num_gpus: int, servers: int = 0, workers: int = 1, is_server: bool = False
) -> Features:
    """All features of one task of a job, with Liquid's names."""
    sizes: Features = {
        "num_gpus": num_gpus,
        "ps_number": servers,
        "worker_number": workers,
        "role": int(is_server),
    }
    return {**sizes, **{key: value for key, value in flags_of(command).items() if key not in sizes}}


def as_number(value: int | str) -> float:
    """The number that the forest uses for a feature."""
    return float(fnv1a_32(value)) if isinstance(value, str) else float(value)


def _number_or_text(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value
