"""Nodes: list, show, drain, uncordon."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, S, W

router = APIRouter(tags=["nodes"], responses=ERRORS)
NodeName = Annotated[str, Path(max_length=64, description="Name of a node.", examples=["local"])]


@router.get("/nodes", response_model=m.NodeList)
async def list_nodes(s: S, who: W) -> m.NodeList:
    """All nodes."""
    return m.NodeList(items=s.nodes.all())


@router.get("/nodes/{node}", response_model=m.Node)
async def show_node(node: NodeName, s: S, who: W) -> m.Node:
    """One node and its jobs."""
    return s.nodes.show(node, who.only)


@router.post("/nodes/{node}/drain", response_model=m.Node)
async def drain(node: NodeName, s: S, who: W) -> m.Node:
    """Take a node out of use: its jobs move to other nodes or wait."""
    who.must_administer()
    s.nodes.drain(node, who.user)
    return s.nodes.show(node, who.only)


@router.post("/nodes/{node}/uncordon", response_model=m.Node)
async def uncordon(node: NodeName, s: S, who: W) -> m.Node:
    """Use a drained node again."""
    who.must_administer()
    s.nodes.uncordon(node, who.user)
    return s.nodes.show(node, who.only)
