"""Why a request is refused. Each class is one HTTP status and one code of the API."""

from __future__ import annotations

from shoal.core.errors import ShoalError


class RequestError(ShoalError):
    status, code = 500, "unexpected"

    def __init__(self, message: str, hint: str | None = None, field: str | None = None) -> None:
        """`hint` says what to do, `field` names the field of the request that is wrong."""
        super().__init__(message)
        self.hint, self.field = hint, field


class Unauthorized(RequestError):
    status, code = 401, "unauthorized"

    def __init__(self) -> None:
        super().__init__(
            "no valid token was given",
            "send `Authorization: Bearer TOKEN`; an admin makes tokens with `shoal token create`",
        )


class Forbidden(RequestError):
    status, code = 403, "forbidden"


class NotFound(RequestError):
    """There is none, or the asker may not see it."""

    status, code = 404, "not_found"


class Conflict(RequestError):
    """The present state does not allow it."""

    status, code = 409, "conflict"


class Busy(RequestError):
    status, code = 429, "busy"


class Invalid(RequestError):
    status, code = 422, "invalid"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field=field)


class Infeasible(RequestError):
    """Even the empty cluster has no placement for this job."""

    status, code = 422, "infeasible"
