"""A second process that compiles what a policy will need, while the first one compiles what it needs now.

    python -m shoal.sim.compile_ahead FIRST_PROCESS POLICY [nodes] [types] [users]

What is compiled is kept on disk, where the first process finds it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from shoal.core.cluster import Cluster
from shoal.sim.interrupts import saves


@contextmanager
def compile_ahead(
    policy: str, cluster: Cluster, compiles: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """What to call when compiling begins. It calls `compiles`, and begins the second process, which ends with this.

    There is none where there is no second processor.
    """
    helpers = []

    def begin() -> None:
        compiles()
        if _processors() > 1:
            from shoal.sim.kernels_ahead import traits_of

            # -P: nothing of the folder that the command happens to run in
            command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), policy, *traits_of(cluster)]
            nothing = subprocess.DEVNULL
            with suppress(OSError):  # all is compiled here, then
                helpers.append(
                    subprocess.Popen(
                        command,
                        stdin=nothing,
                        stdout=nothing,
                        stderr=nothing,
                        start_new_session=True,  # Ctrl-C is for the first process
                    )
                )

    try:
        yield begin
    finally:
        for helper in helpers:
            helper.terminate()
            helper.wait()


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Ending:
    """Ends the process when it is told to, but not while it writes what it has compiled."""

    asked = False

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not saves(frame):
            os._exit(0)


def main(first: int, policy: str, *traits: str) -> None:
    """Compile, one kernel after the other, while the process is there for which it is done."""
    from shoal.sim.kernels_ahead import ahead

    ending = Ending()
    signal.signal(signal.SIGTERM, ending)
    for kernel, types in ahead(policy, traits):
        if os.getppid() != first or ending.asked:
            return
        kernel.compile(types)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
