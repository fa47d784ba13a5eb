"""Errors as answers of the API: all have the same form."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shoal.core.errors import ShoalError
from shoal.server.loop.lifecycle import WrongState
from shoal.server.services.errors import RequestError
from shoal.server.store.store import StoreDown, StoreFull

log = logging.getLogger("shoal.server")


_STATUS: tuple[tuple[type[ShoalError], int, str, str | None], ...] = (
    (WrongState, 409, "conflict", None),
    (StoreFull, 507, "disk_full", "free some space; nothing is lost"),
    (StoreDown, 503, "store_down", "see `shoal doctor`"),
    (ShoalError, 422, "invalid", None),
)


def answer(
    status: int, code: str, message: str, hint: str | None = None, field: str | None = None
) -> JSONResponse:
    body = {"error": {"code": code, "message": message, "hint": hint, "field": field}}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(status)
    return JSONResponse(body, status, headers=headers)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def install(app: FastAPI) -> None:
    """Handle every error of the application."""

    @app.exception_handler(ShoalError)
    async def shoal_error(_: Request, error: ShoalError) -> JSONResponse:
        if isinstance(error, RequestError):
            return answer(error.status, error.code, _one_line(error), error.hint, error.field)
        for kind, status, code, hint in _STATUS:
            if isinstance(error, kind):
                return answer(status, code, _one_line(error), hint)
        raise error

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"] if p != "body")
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = f"there is no field {where!r}"
        message = f"{where}: {text}" if where else text
        # A validator over several fields names the wrong one in its message.
        named = text.split(":")[0] if ":" in text and " " not in text.split(":")[0] else None
        return answer(422, "invalid", " ".join(message.split())[:500], None, (where or named) or None)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "not_found", 405: "invalid", 400: "invalid", 413: "too_large"}
        message = {404: "there is nothing at this address", 405: "this address does not take this method"}
        reply = answer(
            error.status_code,
            codes.get(error.status_code, "invalid"),
            message.get(error.status_code, str(error.detail)),
        )
        reply.headers.update(error.headers or {})
        return reply

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(500, "unexpected", "the server failed; see server.log")
