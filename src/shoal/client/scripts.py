"""Recognise a command that runs a script with `shoal.torch`: such a job is resized while it trains.

Only the script itself is read, not what it imports. A script that gets `shoal.torch` from another module is recognised
when it runs: `shoal.torch.init` refuses to train in a job of several GPUs that is not live.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 4 * 1024 * 1024
#: Modules whose use makes a script elastic.
RUNTIMES = ("shoal.torch", "shoal.integrations.transformers", "shoal.integrations.lightning")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
#: Options of Python that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def uses_runtime(command: Sequence[str], workdir: str | Path) -> bool:
    """Whether this command runs a Python script that imports `shoal.torch`."""
    script = _script(command, Path(workdir))
    if script is None:
        return False
    try:
        with script.open("rb") as file:
            tree = ast.parse(file.read(MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return any(_is_runtime(name) for node in ast.walk(tree) for name in _imports(node))


def _script(command: Sequence[str], workdir: Path) -> Path | None:
    """The file that `python [options] script.py` or `python -m module` runs; None for any other command."""
    words = list(command)
    if not words or not _PYTHON.fullmatch(os.path.basename(words.pop(0))):
        return None
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-m" and words:
            base = workdir.joinpath(*words[0].split("."))
            return base / "__main__.py" if base.is_dir() else base.with_suffix(".py")
        if option in ("-c", "-"):
            return None
        if option in _WITH_VALUE and words:
            words.pop(0)
    return workdir / words[0] if words else None


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _is_runtime(name: str) -> bool:
    return any(name == runtime or name.startswith(f"{runtime}.") for runtime in RUNTIMES)
