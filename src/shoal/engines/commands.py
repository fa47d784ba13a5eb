"""Run a command-line program of an engine, with a time-out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.engines.base import EngineUnavailable


@dataclass(frozen=True, slots=True)
class Finished:
    code: int
    out: str
    err: str


async def run_command(
    argv: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> Finished:
    """Run a program to its end. Raises EngineUnavailable if it does not exist or does not end in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
        )
    except FileNotFoundError:
        raise EngineUnavailable(f"the command {argv[0]} is not on the PATH of this machine") from None
    except OSError as error:
        raise EngineUnavailable(f"cannot run {argv[0]}: {error.strerror or error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin.encode())
    except TimeoutError:
        raise EngineUnavailable(f"{argv[0]} did not answer within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    code = process.returncode
    assert code is not None
    return Finished(code, out.decode(errors="replace"), err.decode(errors="replace").strip())
