"""An error of the runtime that the script has caught is raised again: what follows would be silently wrong."""

from __future__ import annotations

from types import TracebackType


class Latch:
    """`with latch:` keeps the first error that is raised within it, and raises it again wherever it is entered.

    Scripts leave batches out by `except RuntimeError: continue` (those that need too much memory, for example). They
    must not leave out the news that the workers have come apart.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._error = self._error or error
