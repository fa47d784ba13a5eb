"""The HTTP application: routes, errors and limits around the `Services`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shoal import __version__
from shoal.server.api import errors
from shoal.server.api.limits import Buckets, Hosts, Limits
from shoal.server.api.routes import arrays, cluster, jobs, nodes, people, sessions, watch, webhooks, workdirs
from shoal.server.api.routes.common import Services

PREFIX = "/api/v1"


def make_app(
    services: Services | None = None,
    buckets: Buckets | None = None,
    *,
    hosts: Iterable[str] = (),
) -> FastAPI:
    """The application. Without services it can only describe itself.

    `buckets` limit each client's requests, and `hosts` are further names of the server.
    """
    app = FastAPI(
        title="Shoal",
        version="v1",
        description="Share a GPU cluster among many training jobs, elastically and fairly. See docs/api.md.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    for router in (
        jobs.router, arrays.router, watch.router, cluster.router, nodes.router, people.router, webhooks.router,
        workdirs.router, sessions.router,
    ):  # fmt: skip
        app.include_router(router, prefix=PREFIX)
    app.include_router(cluster.outside)
    errors.install(app)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    if services is not None:
        app.state.services = services
        app.add_middleware(
            Limits,
            prefix=PREFIX,
            gate=services.gate,
            hosts=Hosts(hosts),
            answered=services.metrics.answered,
            buckets=buckets,
            upload_bytes=services.workdirs.limit_bytes,
        )
    return app


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of FastAPI, with the token that every path needs."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        document["info"]["x-shoal-version"] = __version__.split("+")[0]
        app.openapi_schema = document
    return app.openapi_schema
