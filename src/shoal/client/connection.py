"""A connection to a server: requests, pages, and streams that resume after a lost connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from httpx_sse import EventSource, ServerSentEvent, connect_sse
from pydantic import BaseModel, TypeAdapter, ValidationError

from shoal.client.errors import (
    BadAnswer,
    ClientError,
    NotAllowed,
    NotRunning,
    TimedOut,
    Unreachable,
    error_for,
)
from shoal.server.api.models import Error
from shoal.server.home import Running, default_home

M = TypeVar("M", bound=BaseModel)

#: A stream gives up this long after it has lost the server. A restart of the server takes less.
RECONNECT_S = 30.0
#: The server sends a comment every 15 s; a connection that is silent twice as long is dead.
SILENCE_S = 30.0
#: What to do without a valid token of this home.
OTHER_TOKEN = "set SHOAL_TOKEN to your token, or give its file by --token-file"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def server_of(home: Path) -> Running:
    """The server of this home, from `server.json`.

    It must live: another process may have taken the port of a server that has ended, and would get the token.
    """
    path = home / "server.json"
    try:
        found = Running.read(path)
    except FileNotFoundError:
        raise NotRunning(f"no server runs on {home}; start one with `shoal up`") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise NotRunning(f"{path} cannot be read; start the server with `shoal up`") from None
    if not found.alive:
        raise NotRunning(
            f"no server runs on {home}: the last one ended unexpectedly; start one with `shoal up`, or give the "
            "address of one on another machine by --server"
        )
    return found


def read_token(path: Path) -> str:
    """Read a token from a file that contains nothing else."""
    try:
        token = path.read_text(errors="replace").strip()
    except OSError as error:
        raise error_for(0, "unauthorized", f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not token.isascii() or not token.isprintable() or not 0 < len(token) <= 1000:
        raise error_for(0, "unauthorized", f"{path} does not contain a token")
    return token


class Connection:
    """A connection to one server. Every failure is a `ClientError` with a one-line message and an exit code."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        home: str | Path | None = None,
        token_file: str | Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Without arguments, connect to the server of `default_home()` with `$SHOAL_TOKEN` or its admin token."""
        self.home = Path(home).expanduser() if home else default_home()
        given = server or os.environ.get("SHOAL_SERVER")
        address = given or server_of(self.home).address
        self._of_home = not given
        if not address.startswith(("http://", "https://")):
            address = f"http://{address}"
        self.address = address.rstrip("/")
        self.host = urlsplit(self.address).hostname or ""
        self.timeout_s = timeout_s
        #: The file with the token of the first admin, if that is the one in use.
        self._token_of_home: Path | None = None
        self._http = httpx.Client(
            base_url=f"{self.address}/api/v1/",
            headers={"Authorization": f"Bearer {token or self._find_token(token_file)}"},
            timeout=timeout_s,
            trust_env=self.host not in LOOPBACK,  # no proxy for this machine itself
            verify=self.address.startswith(
                "https://"
            ),  # loading certificates takes time, and http needs none
        )

    def _find_token(self, token_file: str | Path | None) -> str:
        file = token_file or os.environ.get("SHOAL_TOKEN_FILE")
        if file:
            return read_token(Path(file).expanduser())
        if os.environ.get("SHOAL_TOKEN"):
            return os.environ["SHOAL_TOKEN"]
        if self.host not in LOOPBACK:  # never send this machine's token to another server
            raise error_for(
                0, "unauthorized", "a server on another machine needs a token: --token-file or $SHOAL_TOKEN"
            )
        self._token_of_home = self.home / "admin.token"
        if not self._token_of_home.exists():
            raise error_for(0, "unauthorized", f"there is no {self._token_of_home}; {OTHER_TOKEN}")
        return read_token(self._token_of_home)

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        gives: type[M],
        *,
        body: BaseModel | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> M:
        sent = None if body is None else body.model_dump(mode="json", exclude_unset=True)
        answer = self.request(method, path, json=sent, params=_query(query), headers=dict(headers or {}))
        return parsed(gives, answer.content)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        self.find_server()
        try:
            answer = self._http.request(method, path, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._failed(error) from None
        try:
            _raise_for(answer)
        except NotAllowed as error:
            if error.code != "unauthorized" or self._token_of_home is None:
                raise
            text = f"the token in {self._token_of_home} is not valid any more; {OTHER_TOKEN}"
            raise error_for(answer.status_code, error.code, text) from None
        return answer

    def pages(
        self,
        path: str,
        gives: type[Any],
        query: Mapping[str, Any],
        limit: int | None = None,
        *,
        empty_ends: bool = False,
    ) -> list[Any]:
        """Read all pages. With `empty_ends` there is always a next cursor, and a short page is the last one."""
        tail = query.get("tail")
        if tail is not None and tail > 1000:  # more than a page holds: read everything and keep the end
            return self.pages(path, gives, {**query, "tail": None}, empty_ends=empty_ends)[-tail:]
        found: list[Any] = []
        cursor = None
        while True:
            size = min(1000, limit - len(found)) if limit is not None else 1000
            page = self.call("GET", path, gives, query={**query, "cursor": cursor, "limit": size})
            found += page.items
            cursor = page.next
            full = tail is not None or (limit is not None and len(found) >= limit)
            if not cursor or full or not page.items or (empty_ends and len(page.items) < size):
                return found

    def stream(
        self,
        path: str,
        query: Mapping[str, Any],
        *,
        cursor: str | None = None,
        deadline: float | None = None,
    ) -> Iterator[ServerSentEvent]:
        """Messages of a stream. A connection that breaks is opened again after the last message."""
        lost_s: float | None = None
        while deadline is None or time.monotonic() < deadline:
            sent = {**query, "cursor": cursor} | ({"tail": None, "since": None} if cursor else {})
            problem: Exception | None = None
            try:
                with self._connected(path, sent, deadline) as source:
                    lost_s = None
                    for message in source.iter_sse():
                        if message.data:  # httpx-sse also yields a message without data after a comment
                            cursor = message.id or cursor
                            yield message
                # A stream that the server ends without an end message: the server is shutting down.
            except (httpx.HTTPError, NotRunning) as error:
                problem = error
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            lost_s = lost_s or now
            if now - lost_s > RECONNECT_S:
                raise self._failed(problem) from None
            time.sleep(0.3)

    @contextlib.contextmanager
    def _connected(
        self, path: str, query: Mapping[str, Any], deadline: float | None
    ) -> Iterator[EventSource]:
        self.find_server()
        timeout = httpx.Timeout(self.timeout_s, read=SILENCE_S)
        with connect_sse(self._http, "GET", path, params=_query(query), timeout=timeout) as source:
            if source.response.is_error:
                source.response.read()
                _raise_for(source.response)
            with _hang_up_at(deadline, source.response):
                yield source

    def find_server(self) -> None:
        """Look before every request: the server of a home may have ended, or listen on another port by now."""
        if not self._of_home:
            return
        address = server_of(self.home).address
        if address != self.address:
            self.address = address
            self._http.base_url = httpx.URL(f"{address}/api/v1/")

    def _failed(self, error: Exception | None) -> ClientError:
        if isinstance(error, NotRunning):
            return error
        if isinstance(error, httpx.TimeoutException):
            return TimedOut(f"the server at {self.address} does not answer; look at `shoal status`")
        return Unreachable(
            f"no server answers at {self.address}; start one with `shoal up`, or give --server"
        )


@contextlib.contextmanager
def _hang_up_at(deadline: float | None, answer: httpx.Response) -> Iterator[None]:
    """Close the connection at the deadline, also while the reader blocks in a read."""
    if deadline is None:
        yield
        return

    def hang_up() -> None:
        with contextlib.suppress(OSError, KeyError):
            answer.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _query(query: Mapping[str, Any] | None) -> dict[str, Any]:
    def text(value: Any) -> Any:
        return value.isoformat() if isinstance(value, datetime) else value

    return {k: text(v) for k, v in (query or {}).items() if v is not None}


def segment(text: str) -> str:
    """Quote one segment of a path, so that no name can reach another path."""
    if not text or text in (".", "..") or len(text) > 256:
        raise error_for(404, "not_found", f"there is no {text[:40]!r}")
    return quote(text, safe="")


def made(model: type[M], **fields: Any) -> M:
    """Build a request body; invalid values raise the error that the server would answer."""
    try:
        return model(**{k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise error_for(422, "invalid", f"{field}: {message}" if field else message) from None


def parsed(gives: type[M], text: str | bytes) -> M:
    try:
        return TypeAdapter(gives).validate_json(text)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in what["loc"])
        raise BadAnswer(f"the server's answer is not understood ({where}: {what['msg']})") from None


def _raise_for(answer: httpx.Response) -> None:
    if not answer.is_error and answer.status_code < 300:
        return
    try:
        body = Error.model_validate_json(answer.content).error
        message = body.message if not body.hint else f"{body.message}; {body.hint}"
        raise error_for(answer.status_code, body.code, message, field=body.field)
    except ValidationError:
        raise error_for(
            answer.status_code,
            "unexpected",
            f"the server answered {answer.status_code}, and not in Shoal's format",
        ) from None
