"""Working directories of jobs, for machines that do not share them: upload, and ask whether one is there."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, S, W

router = APIRouter(tags=["working directories"], responses=ERRORS)
Digest = Annotated[
    str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the archive.", examples=["9f" * 32])
]
BODY = {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/workdirs/{digest}", response_model=m.Workdir)
async def show(digest: Digest, s: S, who: W) -> m.Workdir:
    """Whether you have uploaded this directory. If so, it is kept for another hour."""
    return m.Workdir(digest=digest, size_bytes=s.workdirs.size_bytes(who.user, digest))


@router.put("/workdirs/{digest}", response_model=m.Workdir, openapi_extra={"requestBody": BODY})
async def upload(digest: Digest, request: Request, s: S, who: W) -> m.Workdir:
    """Upload a directory as a tar archive of files, directories and symbolic links."""
    who.must_change()
    return m.Workdir(digest=digest, size_bytes=await s.workdirs.receive(who.user, digest, request.stream()))
