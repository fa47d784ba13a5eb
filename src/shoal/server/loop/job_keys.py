"""The key of each live job: what its workers prove their identity with.

A job that runs under the server's account can change the file. So a key that cannot be used is replaced: workers that
know only the old one cannot reconnect, and the job continues with new workers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from shoal.agents.certificate import new_certificate
from shoal.wire.auth import AuthError, JobKey, new_secret, read_key, write_secret


class JobKeys:
    """Reads a key once; from then on the one in memory counts."""

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._keys: dict[int, JobKey] = {}

    def secret(self, job_id: int, directory: Path) -> bytes:
        return self._key(job_id, directory).secret

    def text(self, job_id: int, directory: Path) -> str:
        """The key as in the file. Raises OSError if a new one cannot be written."""
        return self._key(job_id, directory).text

    def forget(self, job_id: int) -> None:
        self._keys.pop(job_id, None)

    def _key(self, job_id: int, directory: Path) -> JobKey:
        if job_id not in self._keys:
            path = directory / "secret"
            self._keys[job_id] = self._read(job_id, path) or self._make(job_id, path)
        return self._keys[job_id]

    def _read(self, job_id: int, path: Path) -> JobKey | None:
        """The key in the file, which is read only once: the job may change it meanwhile."""
        if not path.exists() and not path.is_symlink():
            return None
        try:
            return read_key(path)
        except AuthError as error:
            self._warnings.append(f"the key of job {job_id} was replaced: {error}")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return None

    def _make(self, job_id: int, path: Path) -> JobKey:
        certificate, private = new_certificate(f"shoal job {job_id}")
        key = JobKey(new_secret(), certificate + private)
        path.parent.mkdir(mode=0o700, exist_ok=True)  # the job may have removed its directory
        write_secret(path, key.secret, key.pem)
        return key
