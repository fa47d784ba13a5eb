"""The CPU time of workers of this machine, with all processes below them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shoal.executors.keeper import start_time
from shoal.executors.keeper_files import read_started

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(workers: Mapping[str, Path]) -> dict[str, float]:
    """By worker: the CPU time of its processes so far. Workers of other machines, and ended ones, are left out.

    `workers` has the directory of each. It reads /proc: call it in a separate thread.
    """
    roots = {}
    for worker, directory in workers.items():
        started = read_started(directory)
        if started is not None and started.start_time == start_time(started.pid):
            roots[worker] = started.pid
    if not roots:
        return {}
    parents, used_s = _processes()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    return {worker: _below(root, children, used_s) for worker, root in roots.items()}


def _processes() -> tuple[dict[int, int], dict[int, float]]:
    """(parent, CPU seconds with those of children that it waited for) of every process of the machine."""
    parents: dict[int, int] = {}
    used_s: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        parents[int(name)] = int(fields[1])
        used_s[int(name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return parents, used_s


def _below(root: int, children: Mapping[int, list[int]], used_s: Mapping[int, float]) -> float:
    total, todo = 0.0, [root]
    while todo:
        pid = todo.pop()
        total += used_s.get(pid, 0.0)
        todo += children.get(pid, [])
    return total
