"""What can go wrong when asking a server, each with the exit code of the command line."""

from __future__ import annotations

from shoal.core.errors import ShoalError


class ClientError(ShoalError):
    """The server could not be asked, or said no. The message is one line."""

    exit_code = 1

    def __init__(self, message: str, *, code: str = "unexpected", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class BadAnswer(ClientError):
    """The server said something this version does not understand."""


class NotFound(ClientError):
    """There is none, or you may not see it."""

    exit_code = 3


class NotAllowed(ClientError):
    """No token, one that is not valid, or a role that may not do this."""

    exit_code = 4


class Conflict(ClientError):
    """The thing is not in a state for this."""

    exit_code = 5


class Unreachable(ClientError):
    """Nobody answers."""

    exit_code = 6

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unreachable")


class NotRunning(Unreachable):
    """This home has no server."""


class Rejected(ClientError):
    """The request is against the rules: validation, limits, or a job that can never fit."""

    exit_code = 7


class TimedOut(ClientError):
    """It took longer than was allowed."""

    exit_code = 124

    def __init__(self, message: str) -> None:
        super().__init__(message, code="timeout")


_BY_CODE: dict[str, type[ClientError]] = {
    "unauthorized": NotAllowed,
    "forbidden": NotAllowed,
    "not_found": NotFound,
    "conflict": Conflict,
    "invalid": Rejected,
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


def error_for(status: int, code: str, message: str, *, field: str | None = None) -> ClientError:
    """The exception for an error of the API."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or ClientError
    return kind(message, code=code, field=field)
