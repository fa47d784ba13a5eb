"""Shard groups: a model is sharded over k workers, and a job has k, 2k, 3k, ... of them.

The members of a generation form groups by their rank: the first k, the next k, and so on. The member of rank r has
shard r % k, and all groups have the same state. Groups are added and removed as a whole, so the functions here choose
members in multiples of k. With k = 1 they change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_LINE = "shard groups of"


def group_line(size: int) -> str:
    """The line of a worker's signature that tells the coordinator the size of the groups."""
    return f"{_LINE} {size} workers"


def group_size(signature: Sequence[str] | None) -> int:
    """The size of the groups by the signature of the job; 1 if its model is replicated."""
    for line in signature or ():
        words = line.removeprefix(_LINE).split() if line.startswith(_LINE) else ()
        if len(words) == 2 and words[0].isdecimal() and int(words[0]) > 0:
            return int(words[0])
    return 1


def groups_of(members: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(members[i : i + size]) for i in range(0, len(members), size)]


def whole(workers: Sequence[str], size: int) -> tuple[str, ...]:
    """As many of the first ones as form whole groups."""
    return tuple(workers[: len(workers) - len(workers) % size])


def without_groups_of(members: Sequence[str], unwanted: Collection[str], size: int) -> tuple[str, ...]:
    """The members whose group has none of these workers."""
    kept = [g for g in groups_of(members, size) if not set(g) & set(unwanted)]
    return tuple(w for group in kept for w in group)


def regrouped(members: Sequence[str], remaining: Collection[str], size: int) -> tuple[str, ...]:
    """The remaining members as whole groups, in rank order. Each keeps its shard if there is a place for it.

    Groups that stay whole stay together. The others are put together anew; a worker that gets another shard receives
    it from one that has it.
    """
    if size == 1:
        return tuple(w for w in members if w in remaining)
    found: list[tuple[str, ...]] = []
    left: list[list[str]] = [[] for _ in range(size)]  # by shard
    for group in groups_of(members, size):
        if all(w in remaining for w in group):
            found.append(group)
            continue
        for shard, worker in enumerate(group):
            if worker in remaining:
                left[shard].append(worker)
    for _ in range(sum(map(len, left)) // size):
        places = [have.pop(0) if have else None for have in left]
        found.append(tuple(w or max(left, key=len).pop() for w in places))
    return tuple(w for group in found for w in group)


def unbroken(members_of: dict[str, tuple[str, ...]], size: int) -> tuple[str, ...]:
    """Of workers that have survived, those whose whole group has. `members_of`: the members of each one's generation.

    A worker whose group lost a member may have applied a step that its group could not complete.
    """
    if size == 1:
        return tuple(members_of)
    group_of = {w: next((g for g in groups_of(m, size) if w in g), ()) for w, m in members_of.items()}
    kept = dict.fromkeys(g for g in group_of.values() if g and all(group_of.get(w) == g for w in g))
    return tuple(w for group in kept for w in group)
