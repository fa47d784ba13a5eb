"""Errors of the client, each with the exit code of the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shoal.core.errors import ShoalError


class ClientError(ShoalError):
    """The request failed, or the server refused it. The message is one line."""

    exit_code = 1

    def __init__(self, message: str, *, code: str = "unexpected", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class BadAnswer(ClientError):
    """This version does not understand the server's answer."""


class NotFound(ClientError):
    """The object does not exist, or you may not see it."""

    exit_code = 3


class NotAllowed(ClientError):
    """There is no token, the token is not valid, or the role does not permit the request."""

    exit_code = 4


class Conflict(ClientError):
    """The object is in a state that does not permit the request."""

    exit_code = 5


class Unreachable(ClientError):
    """No server answers."""

    exit_code = 6

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unreachable")


class NotRunning(Unreachable):
    """This home has no server."""


class Rejected(ClientError):
    """The job or the request violates a rule or a limit, or the job can never run on this cluster."""

    exit_code = 7


class WrongInput(Rejected):
    """A request has a value that is not valid. Mistakes in a submitted job raise `Rejected`."""

    exit_code = 2


class TimedOut(ClientError):
    """The time limit has passed."""

    exit_code = 124

    def __init__(self, message: str) -> None:
        super().__init__(message, code="timeout")


_BY_CODE: dict[str, type[ClientError]] = {
    "unauthorized": NotAllowed,
    "forbidden": NotAllowed,
    "not_found": NotFound,
    "conflict": Conflict,
    "invalid": WrongInput,
    "infeasible": Rejected,
    "too_large": Rejected,
}
_BY_STATUS: dict[int, type[ClientError]] = {
    400: Rejected,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: Rejected,
    422: Rejected,
}


@contextlib.contextmanager
def job_rejected() -> Iterator[None]:
    """A value of a submitted job that is not valid is a mistake in the job, as one in a job file."""
    try:
        yield
    except WrongInput as error:
        raise Rejected(str(error), code=error.code, field=error.field) from None


def error_for(status: int, code: str, message: str, *, field: str | None = None) -> ClientError:
    """The exception for an API error."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or ClientError
    return kind(message, code=code, field=field)
