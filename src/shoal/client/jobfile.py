"""Job files: read YAML, check it, and report every mistake with its line, column and remedy.

Files are read with the core schema of YAML 1.2, so that `on`, `1:30` and `2026-01-01` remain strings.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from shoal.client.errors import Rejected
from shoal.client.scripts import uses_runtime
from shoal.client.shell import from_sources
from shoal.core.errors import ShoalError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from shoal.server.api.models import JobSpec

#: Maximum size of a job file; a sensible one has a few kB.
MAX_BYTES = 256 * 1024
#: Maximum number of values: aliases can expand a small file without limit.
MAX_VALUES = 10_000
MISSING = "is missing"
#: Keys whose values are always text: arguments, environments, and `gpus: 4`.
TEXT = {
    ("name",),
    ("command",),
    ("env",),
    ("secrets",),
    ("gpus",),
    ("gpu_types",),
    ("model",),
    ("labels",),
    ("array",),
}
PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool")}
#: Messages in place of pydantic's, which show a regular expression.
PATTERNS = {
    "name": "may have letters, digits, dots, dashes and underscores, at most 63, with a letter or digit at both ends",
    "gpu_types": "may have letters, digits, dots, dashes and underscores, at most 63",
    "env": "a variable's name has letters, digits and underscores, and its value no NUL",
    "secrets": "a variable's name has letters, digits and underscores, and its value no NUL",
    "command": "an argument must not contain NUL",
    "labels": "a label's key has letters, digits, dots, dashes and underscores, and its value no control characters",
}

M = TypeVar("M", bound="BaseModel")
Path_ = tuple[str | int, ...]
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a job file and its place; lines and columns count from 1."""

    message: str
    field: str = ""
    line: int | None = None
    column: int | None = None


class JobFileError(ShoalError):
    """A job file has mistakes; the message is the first one, with its place."""

    exit_code = 7

    def __init__(self, source: str, mistakes: Sequence[Mistake], code: str = "invalid") -> None:
        """`code` is that of the API."""
        self.source, self.code = source, code
        self.mistakes = tuple(mistakes)
        first = mistakes[0]
        where = ":".join(str(p) for p in (source, first.line, first.column) if p is not None)
        field = f"{first.field}: " if first.field else ""
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        super().__init__(f"{where}: {field}{first.message}{more}")


@dataclass(frozen=True, slots=True)
class Document:
    """The plain data of a job file, and the place of each key and value."""

    source: str
    data: dict[str, Any]
    values: Mapping[Path_, Place]
    keys: Mapping[Path_, Place]

    def place(self, path: Path_, *, key: bool = False) -> Place | tuple[None, None]:
        """The place of the value at `path`, or of its key, or of the nearest value that contains it."""
        if key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                return self.values[path[:end]]
        return (None, None)


def read(path: str | Path) -> Document:
    """The document in a file, or from standard input for `-`."""
    return parse(read_text(path), source="<stdin>" if str(path) == "-" else str(path))


def read_text(path: str | Path) -> str:
    """Read at most MAX_BYTES of UTF-8; a larger file is refused."""
    name = "<stdin>" if str(path) == "-" else str(path)
    try:
        if name == "<stdin>":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ShoalError(f"{name}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    if len(raw) > MAX_BYTES:
        limit = f"larger than {MAX_BYTES // 1024} kB, which is too large for a job file; put data into separate files"
        raise JobFileError(name, [Mistake(limit)])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise JobFileError(name, [Mistake("not UTF-8 text", line=line)]) from None


def parse(text: str, *, source: str = "job.yaml") -> Document:
    """Parse to plain data with places. Duplicate keys, several documents and endless aliases are mistakes."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise JobFileError(source, [Mistake("the file is empty; it needs at least a command")])
        if not isinstance(node, yaml.MappingNode):
            raise _error(source, node, "a job file is a list of `key: value` lines")
        reader = _Reader(source, loader)
        return Document(source, reader.value(node, ()), reader.values, reader.keys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        at = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise JobFileError(source, [Mistake(f"not YAML: {message}", "", *at)]) from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ShoalError):
            raise
        raise JobFileError(source, [Mistake(f"not YAML: {' '.join(str(error).split())}")]) from None
    except RecursionError:
        raise JobFileError(source, [Mistake("nested too deeply")]) from None


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """The document after `--set key=value`; a dotted key reaches into a mapping: `env.LR=0.1`."""
    data = _copied(document.data)
    values = dict(document.values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise ShoalError(f"--set {setting}: write key=value, such as --set gpus=1..4")
        target = data
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ShoalError(f"--set {setting}: {part} is not a mapping, so it has no {path[-1]}")
        try:
            value = text if path[:1] in TEXT else yaml.load(text, _Loader)
        except yaml.YAMLError:
            value = text
        target[path[-1]] = value
        for known in [p for p in values if p[: len(path)] == path]:
            del values[known]
    return Document(document.source, data, values, document.keys)


def check(document: Document, model: type[M]) -> M:
    """Validate the document; each mistake is reported at its place in the file."""
    from pydantic import ValidationError

    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise JobFileError(document.source, list(_mistakes(error, document, model))) from None


@contextlib.contextmanager
def at_its_place(document: Document) -> Iterator[None]:
    """If the server rejects a value of the document, say where it is in the file."""
    try:
        yield
    except Rejected as error:
        field = (error.field or "").removeprefix("spec.")
        if field.partition(".")[0] not in document.data:
            raise
        parts = [int(part) if part.isdecimal() else part for part in field.split(".")]
        at = document.place(_in_file(parts, document, missing=False))
        message = str(error).removeprefix(f"{error.field}: ").removeprefix(f"{field}: ")
        raise JobFileError(document.source, [Mistake(message, field, *at)], error.code) from None


def job_spec(document: Document) -> JobSpec:
    """The job in a document. A command may be one line; a relative `workdir` is relative to the file."""
    from shoal.server.api.models import JobSpec

    data = dict(document.data)
    here = Path.cwd() if document.source == "<stdin>" else Path(document.source).resolve().parent
    if isinstance(data.get("command"), str):
        try:
            data["command"] = shlex.split(data["command"])
        except ValueError as error:
            at = document.place(("command",))
            raise JobFileError(document.source, [Mistake(str(error).lower(), "command", *at)]) from None
    if isinstance(data.get("workdir", "."), str):
        data["workdir"] = os.path.normpath(here / os.path.expanduser(data.get("workdir", ".")))
    if "env_from" in data:
        _add_environment(data, here, document)
    recognise(data)
    return check(Document(document.source, data, document.values, document.keys), JobSpec)


def _add_environment(data: dict[str, Any], here: Path, document: Document) -> None:
    """Put the variables of `env_from` into the job; those in `env` and `secrets` win."""
    try:
        env, secrets = from_sources(data.pop("env_from"), here)
    except ShoalError as error:
        message, at = str(error).removeprefix("env_from: "), document.place(("env_from",))
        raise JobFileError(document.source, [Mistake(message, "env_from", *at)]) from None
    for field, more in (("env", env), ("secrets", secrets)):
        given = data.get(field, {})
        if more and isinstance(given, dict):
            other = data.get("secrets" if field == "env" else "env") or {}
            data[field] = {k: v for k, v in more.items() if k not in other} | given


def recognise(data: dict[str, Any]) -> None:
    """A script that uses `shoal.torch` is live whatever its range, unless the job says otherwise."""
    command, workdir = data.get("command"), data.get("workdir")
    if data.get("resize") is not None or not isinstance(command, list) or not isinstance(workdir, str):
        return
    if all(isinstance(word, str) for word in command) and uses_runtime(command, workdir):
        data["resize"] = "live"


def json_schema() -> dict[str, Any]:
    """The published schema (schemas/job.schema.json): the model's schema plus the short forms of a file."""
    from shoal.server.api.models import ENV_NAME, NAME, JobSpec

    schema = JobSpec.model_json_schema()
    scalar = {"type": ["string", "number", "boolean"]}
    fields = schema["properties"]
    words = fields["command"]
    fields["command"] = {
        "anyOf": [{"type": "string", "minLength": 1}, {**words, "items": scalar}],
        "description": "One line, split as a shell would, or a list; no shell runs it.",
    }
    fields["gpus"] = {**fields["gpus"], "type": ["string", "integer"], "examples": [4, "1..8"]}
    fields["array"]["anyOf"] = [{"type": ["string", "integer"], "maxLength": 100}, {"type": "null"}]
    fields["labels"].pop("patternProperties", None)
    fields["labels"] |= {"propertyNames": {"pattern": NAME}, "additionalProperties": scalar}
    one = {"anyOf": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/AfterJob"}]}
    fields["after"] = {**fields["after"], "type": ["array", "string", "integer"], "items": one}
    fields["workdir"]["description"] = "Where the command starts; a relative path is relative to the file."
    fields["workdir"]["default"] = "."
    fields["env_from"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Further variables: `all` of the shell that submits it, or files with lines NAME=value.",
    }
    for name in ("env", "secrets"):
        fields[name].pop("patternProperties", None)
        fields[name] |= {"propertyNames": {"pattern": ENV_NAME}, "additionalProperties": scalar}
    schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shoal job file"}
    schema.pop("example", None)
    return schema


def _mistakes(error: ValidationError, document: Document, model: type[BaseModel]) -> Iterator[Mistake]:
    found: dict[tuple[Place | tuple[None, None], str], Mistake] = {}
    for detail in error.errors(include_url=False, include_context=False):
        path = _in_file(detail["loc"], document, missing=detail["type"] == "missing")
        field = ".".join(str(part) for part in path)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = f"there is no such key; {did_you_mean(str(path[-1]), _keys(model, path[:-1]))}"
        elif detail["type"] == "missing":
            message = MISSING
        elif detail["type"] == "string_pattern_mismatch" and path[0] in PATTERNS:
            message = PATTERNS[str(path[0])]
        elif not path and message.partition(": ")[0] in model.model_fields:
            field, _, message = message.partition(": ")  # a check of the whole job that names one value
            path = (field,)
        at = document.place(path, key=detail["type"] == "extra_forbidden")
        found.setdefault((at, field), Mistake(message, field, *at))
    # Missing keys come last: often the key is there under a wrong name, which is reported first.
    yield from sorted(found.values(), key=lambda m: (m.message == MISSING, m.line or 0, m.column or 0))


def _in_file(loc: Sequence[str | int], document: Document, *, missing: bool) -> Path_:
    """The part of a model's location that exists in the file: unions add other names to it."""
    path: Path_ = ()
    value: Any = document.data
    for i, part in enumerate(loc):
        if isinstance(value, dict) and (part in value or (missing and i == len(loc) - 1)):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            break
        path = (*path, part)
    return path or tuple(loc[:1])


def _keys(model: type[BaseModel], path: Path_) -> list[str]:
    """The keys that a mapping at `path` may have, by the model's schema."""
    schema = model.model_json_schema()
    here = schema
    for part in path:
        here = here.get("properties", {}).get(str(part), {})
        for option in (here, *here.get("anyOf", []), *here.get("allOf", [])):
            if "$ref" in option:
                here = schema["$defs"][option["$ref"].rsplit("/", 1)[-1]]
                break
    return list(here.get("properties", {}))


class _Loader(yaml.SafeLoader):
    """A safe loader with only the implicit types of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Read `010` as ten, not as octal."""
    return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


@dataclass
class _Reader:
    """Converts nodes to plain data and records their places."""

    source: str
    loader: yaml.SafeLoader

    def __post_init__(self) -> None:
        self.values: dict[Path_, Place] = {}
        self.keys: dict[Path_, Place] = {}
        self.count = 0

    def value(self, node: yaml.Node, path: Path_) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _error(self.source, node, f"more than {MAX_VALUES:,} values; no job file needs that many")
        self.values[path] = _place(node)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
        if path[:1] in TEXT and node.tag in PLAIN_TAGS:
            return node.value  # 1e3 and 007 remain as written
        return self.loader.construct_object(node)

    def mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise _error(self.source, key_node, "a key must be a word")
            if key in made:
                line = self.keys[(*path, key)][0]
                raise _error(self.source, key_node, f"{key!r} is given twice, first on line {line}")
            self.keys[(*path, key)] = _place(key_node)
            made[key] = self.value(value_node, (*path, key))
        return made


def _place(node: yaml.Node) -> Place:
    return (node.start_mark.line + 1, node.start_mark.column + 1)


def _error(source: str, node: yaml.Node, message: str) -> JobFileError:
    return JobFileError(source, [Mistake(message, "", *_place(node))])


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value
