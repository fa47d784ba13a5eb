"""Files of a worker that nobody else may read, such as the key of its job. They are deleted when it has ended."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from shoal.wire.regular_file import write_new


class SecretFiles:
    """In the directory `secrets` of a worker's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "secrets"

    def env(self, files: Mapping[str, str]) -> dict[str, str]:
        """The variables that name the paths."""
        return {name: str(self._directory / name.lower()) for name in files}

    def write(self, files: Mapping[str, str]) -> None:
        if not files:
            return
        self.remove()
        self._directory.mkdir(mode=0o700)  # not a link to another directory
        for name, text in files.items():
            write_new(self._directory / name.lower(), text)

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
