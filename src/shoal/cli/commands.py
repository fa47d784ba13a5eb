"""The commands of `shoal`; errors become one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

import click

from shoal import __version__
from shoal.cli.lazy import LazyGroup
from shoal.core.errors import ShoalError

COMMANDS = {
    "run": ("shoal.cli.run:run", "Run a command on GPUs and exit with its result."),
    "submit": ("shoal.cli.submit:submit", "Submit a job file."),
    "plan": ("shoal.cli.plan:plan", "Show what would happen if a job were submitted now."),
    "ps": ("shoal.cli.ps:ps", "List jobs, each with the reason why it has no more GPUs."),
    "show": ("shoal.cli.show:show", "Show the details of a job."),
    "why": ("shoal.cli.why:why", "Explain why a job waits or has no more GPUs, and what would help."),
    "logs": ("shoal.cli.logs:logs", "Print the output of a job's workers."),
    "exec": ("shoal.cli.exec:exec_", "Run a command next to a running job."),
    "events": ("shoal.cli.events:events", "List events: what happened to jobs, and who did it."),
    "wait": ("shoal.cli.wait:wait", "Wait until a job runs, has a given size, or ends."),
    "cancel": ("shoal.cli.cancel:cancel", "Cancel jobs."),
    "pause": ("shoal.cli.hold:pause", "Pause jobs; they keep their state."),
    "resume": ("shoal.cli.hold:resume", "Resume paused jobs."),
    "scale": ("shoal.cli.scale:scale", "Change a job's range of GPUs."),
    "checkpoint": ("shoal.cli.hold:checkpoint", "Ask running jobs to save their state."),
    "profile": ("shoal.cli.profile:profile", "Show a job's speed by its number of GPUs."),
    "shares": ("shoal.cli.shares:shares", "Show each user's GPUs and fair share."),
    "up": ("shoal.cli.up:up", "Start the control plane on this machine."),
    "down": ("shoal.cli.down:down", "Stop the control plane."),
    "status": ("shoal.cli.status:status", "Show the server, its policy, GPUs and jobs."),
    "doctor": ("shoal.cli.doctor:doctor", "Check this machine and the server."),
    "agent": ("shoal.cli.agent:agent", "Run workers on this machine for a server elsewhere."),
    "node": ("shoal.cli.node:GROUP", "Nodes: ls, show, drain, uncordon, rm, add, join-token."),
    "user": ("shoal.cli.user:GROUP", "Users, their roles, tickets and limits: ls, show, create, set, rm."),
    "group": ("shoal.cli.group:GROUP", "Groups of users with limits: ls, show, create, set, rm."),
    "notify": ("shoal.cli.notify:GROUP", "Notifications about your jobs: ls, add, test, rm."),
    "token": ("shoal.cli.token:GROUP", "Tokens: ls, create, rm."),
    "sim": ("shoal.cli.sim:GROUP", "Simulate a cluster: run, compare, gen, import, profile, paper."),
    "policy": (
        "shoal.cli.policy:GROUP",
        "Policies: ls, show; get and set the policy of the running cluster.",
    ),
    "completion": ("shoal.cli.completion:completion", "Print the completion script for bash, zsh or fish."),
    "version": ("shoal.cli.version:version", "Print the version of this program and of the server."),
}

#: Options before the command, which hold for every command, and the variables that they set.
GLOBAL = {"--no-color": "NO_COLOR", "--quiet": "SHOAL_QUIET"}
#: A shell sets this variable to ask for completions; see `shoal completion`.
COMPLETE_VARIABLE = "_SHOAL_COMPLETE"

cli = LazyGroup(
    "shoal",
    COMMANDS,
    "Share a GPU cluster among many deep-learning training jobs, elastically and fairly.",
    epilog="Start with:  shoal up --gpus 4    or, without a cluster:  shoal sim compare --sample\n\n"
    "Before any command: --no-color, and --quiet to print only results and errors.",
)


def run(argv: list[str] | None = None) -> NoReturn:
    """Run a command and exit with its code. `main` handles Ctrl-C."""
    argv = _apply_global(sys.argv[1:] if argv is None else argv)
    if argv in (["-V"], ["--version"]):
        print(f"shoal {__version__}")
        sys.exit(0)
    if COMPLETE_VARIABLE in os.environ:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "shoal", COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE]))
    try:
        with cli.make_context("shoal", argv) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        fail(f"{error.format_message()}{hint}", 2)
    except click.ClickException as error:
        fail(error.format_message(), error.exit_code)
    except click.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # the reader, such as `head`, has ended
        _discard_output()
    except ShoalError as error:
        fail(str(error), getattr(error, "exit_code", 2))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename:
            raise
        _discard_output()
        fail(f"cannot write the output: {error.strerror}", 1)
    sys.exit(0)


def _discard_output() -> None:
    """Send the rest of stdout to /dev/null: Python would fail again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _apply_global(argv: list[str]) -> list[str]:
    """Apply the options before the command; return the other arguments."""
    while argv and argv[0] in GLOBAL:
        os.environ[GLOBAL[argv[0]]] = "1"
        argv = argv[1:]
    return argv


def fail(message: str, code: int) -> NoReturn:
    """Print an error in one line and exit."""
    print(f"shoal: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
