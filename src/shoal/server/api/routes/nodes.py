"""Nodes: list, show, drain, uncordon, remove; and the tokens with which they join."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, S, W

router = APIRouter(tags=["nodes"], responses=ERRORS)
NodeName = Annotated[str, Path(max_length=64, description="Name of a node.", examples=["local"])]

TokenId = Annotated[str, Path(max_length=64, description="Id of a join token.", examples=["9f2c41d07ab3"])]


@router.get("/nodes", response_model=m.NodeList)
async def list_nodes(s: S, who: W) -> m.NodeList:
    """All nodes."""
    refused = s.join_tokens.refused() if who.role is m.Role.ADMIN else []
    return m.NodeList(items=s.nodes.all(), refused=refused)


@router.get("/nodes/{node}", response_model=m.Node)
async def show_node(node: NodeName, s: S, who: W) -> m.Node:
    """One node and its jobs."""
    return s.nodes.show(node, who.only)


@router.delete("/nodes/{node}", status_code=204)
async def remove_node(node: NodeName, s: S, who: W) -> None:
    """Forget a node that is lost. Its agent needs a new join token to come back."""
    who.must_administer()
    s.join_tokens.remove_node(node, who.user)


@router.get("/join-tokens", response_model=m.JoinTokenList)
async def list_join_tokens(s: S, who: W) -> m.JoinTokenList:
    """The join tokens that have not expired. The tokens themselves are not shown."""
    who.must_administer()
    return m.JoinTokenList(items=s.join_tokens.all())


@router.post("/join-tokens", status_code=201, response_model=m.JoinTokenCreated)
async def create_join_token(new: m.JoinTokenCreate, s: S, who: W) -> m.JoinTokenCreated:
    """Make a token with which one agent can join. It expires no later than the token that makes it."""
    who.must_administer()
    return await s.join_tokens.create(new.expires_in_s, who.user, latest_s=who.expires_s)


@router.delete("/join-tokens/{token}", status_code=204)
async def remove_join_token(token: TokenId, s: S, who: W) -> None:
    """Nobody can join with it any more. An agent that has joined stays."""
    who.must_administer()
    s.join_tokens.remove(token, who.user)


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
