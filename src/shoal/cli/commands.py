"""All commands of `shoal`. Turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys

import typer

from shoal import __version__
from shoal.cli.lazy import ClickException, LazyGroup, NobodyReads, UsageError

COMMANDS = {
    "run": ("shoal.cli.run:run", "Run a command on GPUs, and end as it ends."),
    "submit": ("shoal.cli.submit:submit", "Submit a job file."),
    "plan": ("shoal.cli.plan:plan", "What would happen if a job were submitted now."),
    "ps": ("shoal.cli.ps:ps", "The jobs, and why each does not have all it could use."),
    "show": ("shoal.cli.show:show", "All that is known of a job."),
    "why": ("shoal.cli.why:why", "Why a job waits or is not larger, and what would help."),
    "logs": ("shoal.cli.logs:logs", "The output of a job's workers."),
    "events": ("shoal.cli.events:events", "What happened."),
    "wait": ("shoal.cli.wait:wait", "Wait until a job runs, has a size, or is over."),
    "cancel": ("shoal.cli.cancel:cancel", "Cancel jobs."),
    "pause": ("shoal.cli.hold:pause", "Hold jobs back; they keep their state."),
    "resume": ("shoal.cli.hold:resume", "Let paused jobs go on."),
    "scale": ("shoal.cli.scale:scale", "Give a job another range of GPUs."),
    "checkpoint": ("shoal.cli.hold:checkpoint", "Ask running jobs to save their state."),
    "profile": ("shoal.cli.profile:profile", "How fast a job is by its number of GPUs."),
    "shares": ("shoal.cli.shares:shares", "Who holds what, and is it fair: the ledger."),
    "up": ("shoal.cli.up:up", "Start the control plane of this machine."),
    "down": ("shoal.cli.down:down", "End it."),
    "status": ("shoal.cli.status:status", "Where the server is, and what is in force."),
    "doctor": ("shoal.cli.doctor:doctor", "What is missing, and what to do."),
    "node": ("shoal.cli.node:GROUP", "Nodes: ls, show, drain, uncordon."),
    "user": ("shoal.cli.user:GROUP", "Users, their roles and tickets: ls, show, create, set, rm."),
    "token": ("shoal.cli.token:GROUP", "Tokens: ls, create, rm."),
    "sim": ("shoal.cli.sim:GROUP", "Simulate a cluster: run, compare, gen, import, profile, paper."),
    "policy": ("shoal.cli.policy:GROUP", "Policies: ls, show; get and set that of the running cluster."),
    "completion": ("shoal.cli.completion:completion", "Completion for bash, zsh or fish."),
    "version": ("shoal.cli.version:version", "The version of this program and of the server."),
}


GLOBAL = {"--no-color": "NO_COLOR", "--quiet": "SHOAL_QUIET"}

cli = LazyGroup(
    "shoal",
    COMMANDS,
    "Share a GPU cluster among many deep-learning training jobs, elastically and fairly.",
    epilog="Start with:  shoal up --gpus 4    or, without a cluster:  shoal sim compare --sample\n\n"
    "Before any command: --no-color, and --quiet for no words but errors.",
)


def run(argv: list[str] | None = None) -> None:
    """Run a command, and end with its exit code; Ctrl-C is left to `main`."""
    argv = _with_global(sys.argv[1:] if argv is None else argv)
    if argv in (["-V"], ["--version"]):
        print(f"shoal {__version__}")
        return
    if "_SHOAL_COMPLETE" in os.environ:  # a shell asks what could follow
        from typer.completion import completion_init

        completion_init()
    try:
        code = cli.main(args=argv, prog_name="shoal", standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(code)
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
    except typer.Abort:
        raise KeyboardInterrupt from None
    except (NobodyReads, BrokenPipeError):
        _print_no_more()
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename:
            raise
        _print_no_more()
        fail(f"cannot write the output: {error.strerror}", 1)
    except Exception as error:
        from shoal.core.errors import ShoalError

        if isinstance(error, ShoalError):
            fail(str(error), getattr(error, "exit_code", 2))
        raise


def _print_no_more() -> None:
    """Python would try again as it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_global(argv: list[str]) -> list[str]:
    """Heed what stands before the command and holds for all of them."""
    while argv and argv[0] in GLOBAL:
        os.environ[GLOBAL[argv[0]]] = "1"
        argv = argv[1:]
    return argv


def fail(message: str, code: int) -> None:
    """Say what is wrong in one line, and end."""
    print(f"shoal: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
