"""The key of each live job: what its workers prove their identity with.

A job that runs under the server's account can change the file. So a key that cannot be used is replaced: workers that
know only the old one cannot reconnect, and the job continues with new workers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from shoal.agents.certificate import new_certificate
from shoal.wire.auth import AuthError, JobKey, new_secret, read_key, write_secret
from shoal.wire.regular_file import read_regular


class JobKeys:
    """Reads a key once; from then on the one in memory counts."""

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._texts: dict[int, str] = {}

    def secret(self, job_id: int, directory: Path) -> bytes:
        return JobKey.parse(self.text(job_id, directory).encode()).secret

    def text(self, job_id: int, directory: Path) -> str:
        """The key as in the file. Raises OSError if a new one cannot be written."""
        if job_id not in self._texts:
            self._texts[job_id] = self._read_or_make(job_id, directory / "secret")
        return self._texts[job_id]

    def forget(self, job_id: int) -> None:
        self._texts.pop(job_id, None)

    def _read_or_make(self, job_id: int, path: Path) -> str:
        if path.exists() or path.is_symlink():
            try:
                read_key(path)
                return read_regular(path).decode()
            except (AuthError, OSError, ValueError) as error:
                self._warnings.append(f"the key of job {job_id} was replaced: {error}")
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
        certificate, private = new_certificate(f"shoal job {job_id}")
        path.parent.mkdir(mode=0o700, exist_ok=True)  # the job may have removed its directory
        write_secret(path, new_secret(), certificate + private)
        return path.read_text()
