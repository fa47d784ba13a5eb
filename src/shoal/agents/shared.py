"""Proof that a machine shares a directory with the control plane: each has read a file that the other wrote.

A path of the same name proves nothing, because every machine has a /home. The control plane writes a file with a random
text when it starts. An agent that connects is asked for that text, and writes a file with a random name of its own,
which the control plane then looks for. Until both were found the directory counts as not shared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.wire import agent_messages as am

PROBE = ".shared-probe"
MOST_BYTES = 200
LEFT_OVER_S = 3600.0
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether an agent's machine shares the directory and, if not, why."""

    shares: bool
    why: str = ""


class SharedProof:
    """The control plane's side, for one directory."""

    def __init__(self, directory: Path) -> None:
        """Write the file. Raises OSError."""
        self.directory = directory
        self._text = secrets.token_hex(16)
        self._of: dict[str, Sharing] = {}
        for left_over in directory.glob(f"{PROBE}.*"):  # of agents that were killed
            with contextlib.suppress(OSError):
                if time.time() - left_over.stat().st_mtime > LEFT_OVER_S:
                    left_over.unlink()
        _write(directory / f"{PROBE}.new", self._text)
        os.replace(directory / f"{PROBE}.new", directory / PROBE)

    def probe(self, addresses: tuple[str, ...] = ()) -> am.Probe:
        return am.Probe(str(self.directory), addresses)

    def of(self, agent: str) -> Sharing | None:
        """None: it has not answered yet."""
        return self._of.get(agent)

    def forget(self, agent: str) -> None:
        """It connects anew: its machine may be another one, or have mounted the directory."""
        self._of.pop(agent, None)

    def answered(self, agent: str, answer: am.Probed) -> Sharing:
        """Judge an agent's answer. It looks for the agent's file: call it in a separate thread."""
        self._of[agent] = found = self._judge(answer)
        return found

    def _judge(self, answer: am.Probed) -> Sharing:
        if answer.why:
            return Sharing(False, answer.why)
        if answer.text != self._text:
            return Sharing(False, f"another directory is at {self.directory}")
        path = self.directory / f"{PROBE}.{answer.name}"
        try:
            same = _read(path) == answer.name
            path.unlink()
        except OSError:
            return Sharing(False, f"what it writes to {self.directory} does not appear here")
        return Sharing(same, "" if same else f"what it writes to {self.directory} appears here changed")


def answer_probe(probe: am.Probe) -> am.Probed:
    """The agent's side. It may hang as long as the file system does: call it in a separate thread."""
    found = _answer(probe)
    failed = {address: why for address in probe.addresses if (why := _try_to_connect(address))}
    return msgspec.structs.replace(found, unreachable=failed)


def _try_to_connect(address: str) -> str:
    """Why it is not possible. Empty: it is."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        return _words(error) if isinstance(error, OSError) else str(error)
    return ""


def _answer(probe: am.Probe) -> am.Probed:
    directory, name = Path(probe.directory), secrets.token_hex(16)
    try:
        text = _read(directory / PROBE)
    except OSError as error:
        return am.Probed(probe.directory, why=f"it cannot read {directory}: {_words(error)}")
    try:
        _write(directory / f"{PROBE}.{name}", name)
    except OSError as error:
        return am.Probed(probe.directory, why=f"it cannot write to {directory}: {_words(error)}")
    return am.Probed(probe.directory, text, name)


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace")


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
