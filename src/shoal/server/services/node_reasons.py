"""What the state of nodes adds to the reason why a job lacks GPUs."""

from __future__ import annotations

from shoal.core.words import listed
from shoal.server.api import models as m
from shoal.server.loop.live_job import SUSPENDED, LiveJob
from shoal.server.loop.node_table import NodeTable

MOST_NAMED = 3


def with_nodes(reason: m.Reason, job: LiveJob, table: NodeTable) -> m.Reason:
    """The reason of a job that has no GPUs, with what the nodes have to do with it."""
    if job.target_gpus:
        return reason
    bound = dict.fromkeys(w.node for w in job.workers.values() if w.state == SUSPENDED)
    if bound and any((index := table.find(name)) is None or index in table.out_of_use for name in bound):
        return _and(reason, f"its processes are suspended on {_states(list(bound), table)}")
    if bound and len(table) > 1:
        return _and(reason, f"its processes are suspended on {listed(list(bound))} and go on only there")
    if len(table.out_of_use) < len(table):
        return reason
    if not len(table):
        text = "no node has joined: `shoal node add HOST` tells how"
    else:
        text = f"no node is ready: {_states([info.name for info in table.infos], table)}"
    return m.Reason(code=reason.code, sentence=text, evidence=reason.evidence)


def _and(reason: m.Reason, text: str) -> m.Reason:
    return m.Reason(code=reason.code, sentence=f"{reason.sentence}; {text}", evidence=reason.evidence)


def _states(names: list[str], table: NodeTable) -> str:
    """`a (drained), b (unreachable: connection closed)`."""
    found = []
    for name in names[:MOST_NAMED]:
        index = table.find(name)
        record = None if index is None else table.records[index]
        why = "" if record is None or not record.reason else f": {record.reason}"
        found.append(f"{name} ({'gone' if record is None else record.state}{why})")
    return listed(found, len(names))
