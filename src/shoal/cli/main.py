"""`shoal`: the entry point. It imports the rest inside `main`, so that Ctrl-C during these imports is handled too."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run a command. Exit codes: 0 ok, 1 unexpected, 2 bad usage or input, 130 or 143 interrupted."""
    try:
        from shoal.cli.commands import run

        run(argv)
    except BaseException as error:
        # Python wraps a KeyboardInterrupt that is raised while a class is created or a kernel runs.
        if KeyboardInterrupt not in (type(error), type(error.__cause__)):
            raise
        from shoal.sim.interrupts import stop

        print("shoal: interrupted", file=sys.stderr)
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    main()
