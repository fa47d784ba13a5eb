"""`shoal`: the entry point. Turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from shoal import __version__
from shoal.cli.lazy import ClickException, LazyGroup, UsageError

COMMANDS = {
    "sim": ("shoal.cli.sim:GROUP", "Simulate a cluster: run, compare, gen, import, paper."),
    "policy": ("shoal.cli.policy:GROUP", "Policies: which there are, and what each one does."),
}


cli = LazyGroup(
    "shoal",
    COMMANDS,
    "Share a GPU cluster among many deep-learning training jobs, elastically and fairly.",
    epilog="Start with:  shoal sim compare --sample      (shoal --version tells the version)",
)


def main(argv: list[str] | None = None) -> None:
    """Run a command. Exit codes: 0 ok, 1 unexpected, 2 bad usage or input, 130 interrupted."""
    if (sys.argv[1:] if argv is None else argv) in (["-V"], ["--version"]):
        print(f"shoal {__version__}")
        return
    try:
        sys.exit(cli.main(args=argv, prog_name="shoal", standalone_mode=False) or 0)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not a mistake: a question
            print(error.format_message())
            sys.exit(0)
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        fail(f"{error.format_message()}{hint}", 2)
    except ClickException as error:
        fail(error.format_message(), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        from shoal.core.errors import ShoalError

        if isinstance(error, ShoalError):
            fail(str(error), getattr(error, "exit_code", 2))
        raise


def fail(message: str, code: int) -> None:
    """Say what is wrong in one line, and end."""
    print(f"shoal: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
