"""Print results and errors in the output format; with `-o json` an error is one JSON object on stderr."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.cli.out import Output
from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., Any])


def reported(command: F) -> F:
    """Wrap a command: with `-o json`, `jsonl` or `yaml`, its errors are one JSON object on stderr."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ShoalError as error:
            if kwargs.get("output") not in (Output.JSON, Output.JSONL, Output.YAML):
                raise
            print(json.dumps({"error": error_object(error)}), file=sys.stderr)
            raise SystemExit(getattr(error, "exit_code", 2)) from None

    return run  # type: ignore[return-value]


def error_object(error: ShoalError) -> dict[str, Any]:
    """The error in the API's form, with the file and line if they are known."""
    made: dict[str, Any] = {
        "code": getattr(error, "code", "invalid"),
        "message": " ".join(str(error).split()),
        "field": getattr(error, "field", None),
        "exit_code": getattr(error, "exit_code", 2),
    }
    made |= {name: at for name in ("file", "line") if (at := getattr(error, name, None)) is not None}
    mistakes = getattr(error, "mistakes", ())
    if mistakes:
        made["mistakes"] = [
            {"message": m.message, "field": m.field, "line": m.line, "column": m.column} for m in mistakes
        ]
    return made


def plain(model: BaseModel) -> dict[str, Any]:
    """A model as the API serializes it."""
    return model.model_dump(mode="json")


def print_document(output: Output, document: BaseModel, name: str | Sequence[str]) -> None:
    """Print one object, or a list with its `items`, in a machine-readable format."""
    data = plain(document)
    if output is Output.JSON:
        from shoal.cli.out import print_json

        print_json(data)
    elif output is Output.YAML:
        import yaml

        print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
    elif output is Output.JSONL:
        print_lines(data.get("items", [data]))
    else:
        print("\n".join([name] if isinstance(name, str) else name), end="\n" if name else "")


def print_lines(items: Iterable[Any]) -> None:
    """Print JSON lines, each flushed at once for a reader that follows."""
    for item in items:
        print(json.dumps(item, ensure_ascii=False), flush=True)
