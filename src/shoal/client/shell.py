"""What a job gets of the environment of the shell that submits it, and of files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from shoal.core.errors import ShoalError

#: Variables that make `python` in a job the `python` of the shell that submits it.
SHELL_ENV = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")
#: Variables of `--env-all` that belong to the shell and its terminal.
_OF_SHELL = frozenset(
    {
        *(
            "_",
            "HOME",
            "USER",
            "LOGNAME",
            "SHELL",
            "PWD",
            "OLDPWD",
            "SHLVL",
            "TERM",
            "COLUMNS",
            "LINES",
            "TTY",
        ),
        *("DISPLAY", "WAYLAND_DISPLAY", "TMPDIR"),
    }
)
_OF_SHELL_PREFIXES = ("SSH_", "XDG_", "DBUS_", "TMUX", "STY", "BASH_FUNC_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
#: Variables of `--env-all` and `env_from` whose values are passed on as secrets, which are never shown.
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY", re.IGNORECASE
)


def shell_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in SHELL_ENV if os.environ.get(name)}


def whole_environment() -> tuple[dict[str, str], dict[str, str]]:
    """(variables, secrets): all of the shell's that mean something elsewhere and that a job may set."""
    from shoal.server.api.models import is_reserved

    found = {
        name: value
        for name, value in os.environ.items()
        if _NAME.fullmatch(name)
        and not is_reserved(name)
        and name not in _OF_SHELL
        and not name.startswith(_OF_SHELL_PREFIXES)
    }
    return _split(found)


def _split(found: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(variables, secrets), by their names."""
    secrets = {name: value for name, value in found.items() if _SECRET.search(name)}
    return {name: value for name, value in found.items() if name not in secrets}, secrets


def environment_file(path: Path) -> dict[str, str]:
    """The variables of a file with lines `NAME=value`; `#` begins a comment line, quotes around a value are removed."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ShoalError(f"env_from: cannot read {path}: {why}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise ShoalError(f"{path}:{number}: write NAME=value")
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def from_sources(sources: object, here: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(variables, secrets) of `env_from`: `all`, a file, or a list of them. Later ones win."""
    listed = sources if isinstance(sources, list) else [sources]
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for source in listed:
        if not isinstance(source, str) or not source:
            raise ShoalError("env_from: write `all`, a file with lines NAME=value, or a list of them")
        more, hidden = (
            whole_environment()
            if source == "all"
            else _split(environment_file(here / os.path.expanduser(source)))
        )
        env, secrets = env | more, secrets | hidden
    return env, secrets
