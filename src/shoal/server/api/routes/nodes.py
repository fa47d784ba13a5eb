"""Nodes: which there are, who is on them, and taking one out of use."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from shoal.core.errors import did_you_mean
from shoal.server.api import models as m
from shoal.server.api.auth import Who
from shoal.server.api.errors import NotFound
from shoal.server.api.routes.common import ERRORS, S, Server, W, printable
from shoal.server.loop.live_job import job_ref

router = APIRouter(tags=["nodes"], responses=ERRORS)
NodeName = Annotated[str, Path(max_length=64, description="Name of a node.", examples=["local"])]
MOST_DEVICES = 64


def node_status(s: Server, index: int) -> m.NodeStatus:
    c = s.conductor
    node = c.nodes[index]
    return m.NodeStatus(
        name=node.name,
        gpu_type=node.gpu_type,
        gpus=node.gpus,
        used=c.devices.used_of(index),
        virtual=node.virtual,
        devices=list(node.devices)[:MOST_DEVICES],
        state="drained" if index in c.drained else "ready",
    )


def _find(s: Server, name: str) -> int:
    names = [n.name for n in s.conductor.nodes]
    if name not in names:
        hint = did_you_mean(name, names) if len(names) < 1000 else None
        raise NotFound(f"there is no node {printable(name)!r}", hint)
    return names.index(name)


def _node(s: Server, who: Who, index: int) -> m.Node:
    on_it = [
        job
        for job in s.conductor.jobs.values()
        if any(w.device[0] == index and w.holds_gpu for w in job.workers.values())
    ]
    refs = [job_ref(job, who.sees_all or job.user == who.user) for job in on_it]
    return m.Node(**node_status(s, index).model_dump(), jobs=refs)


@router.get("/nodes", response_model=m.NodeList)
async def list_nodes(s: S, who: W) -> m.NodeList:
    """The machines there are."""
    return m.NodeList(items=[node_status(s, i) for i in range(len(s.conductor.nodes))])


@router.get("/nodes/{node}", response_model=m.Node)
async def show_node(node: NodeName, s: S, who: W) -> m.Node:
    """One machine, and the jobs on it."""
    return _node(s, who, _find(s, node))


@router.post("/nodes/{node}/drain", response_model=m.Node)
async def drain(node: NodeName, s: S, who: W) -> m.Node:
    """Take a node out of use: its jobs go elsewhere, or wait until there is room."""
    who.must_administer()
    index = _find(s, node)
    s.verbs.drain(index, who.user)
    return _node(s, who, index)


@router.post("/nodes/{node}/uncordon", response_model=m.Node)
async def uncordon(node: NodeName, s: S, who: W) -> m.Node:
    """Use a drained node again."""
    who.must_administer()
    index = _find(s, node)
    s.verbs.uncordon(index, who.user)
    return _node(s, who, index)
