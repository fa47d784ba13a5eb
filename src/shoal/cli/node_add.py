"""`shoal node add`: what to run on a machine so that it joins."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from shoal.cli.options import on_server

if TYPE_CHECKING:
    from shoal.client import Client


@click.command()
@click.argument("host", help="The machine, as ssh knows it.")
@click.option("--ssh", is_flag=True, help="Run the command there by ssh, instead of printing it.")
@click.option("--name", help="Name of the node. Default: that of the host.")
@click.option(
    "--gpus", type=click.IntRange(1, 100_000), help="Number of virtual GPUs. Default: the real GPUs."
)
@click.option("--type", "gpu_type", metavar="TYPE", help="Type of the GPUs. Default: as the driver says.")
@click.option("--rack", help="Rack of the machine, for the topology.")
@click.option("--domain", help="Domain of the rack, for the topology.")
@click.option("--python", default="python3", help="The Python on that machine that has Shoal.")
@click.option("--expires", default="1h", help="Lifetime of the token that is made for it.")
@on_server
def add(
    client: Client,
    host: str,
    ssh: bool,
    name: str | None,
    gpus: int | None,
    gpu_type: str | None,
    rack: str | None,
    domain: str | None,
    python: str,
    expires: str,
) -> None:
    """Print the one command that lets a machine join, or run it there with --ssh."""
    from shoal.cli.out import say
    from shoal.cli.times import seconds

    name = name or host.rpartition("@")[2].partition(".")[0]
    made = client.create_join_token(expires_in_s=seconds(expires))
    given = {"--type": gpu_type, "--rack": rack, "--domain": domain, "--gpus": gpus}
    words = ["--join", made.address, "--name", name]
    words += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    command = started(python, name, words)
    if not ssh:
        # The token is in the script's input, not among the arguments, which other users of that machine can see.
        print(f"echo {made.token} | ssh -- {shlex.quote(host)} {shlex.quote(command)}")
        there = shlex.join(["shoal", "agent", *words, "--token-file", "FILE"])
        say(f"Run this line here. Or, on the machine itself, put the token into a file and run `{there}`.")
        if made.address.startswith(("127.", "localhost", "[::1]")) and host not in ("localhost", "127.0.0.1"):
            say(
                f"warning: {host} cannot reach {made.address}: start the server with `shoal up --advertise ADDRESS`, "
                "the address of this machine that others know"
            )
        return
    _run(host, command, made.token)
    say(
        f"{name} was started; `shoal node ls` shows it when it has joined. If it does not, its log says why: "
        f"~/.local/state/shoal-agent/{name}/agent.log there"
    )


def started(python: str, name: str, words: list[str]) -> str:
    """A shell command that reads the token from its input and leaves an agent in the background.

    Each name has a directory of its own: machines may share a home directory.
    """
    run = shlex.join([python, "-m", "shoal.cli.main", "agent", *words])
    return (
        f'd="${{XDG_STATE_HOME:-$HOME/.local/state}}/shoal-agent/"{shlex.quote(name)}; '
        'umask 077 && mkdir -p "$d" && cat > "$d/join-token" && '
        f'{{ setsid nohup {run} --state "$d" --token-file "$d/join-token" >> "$d/agent.log" 2>&1 < /dev/null & }}'
    )


def _run(host: str, command: str, token: str) -> None:
    import subprocess

    from shoal.core.errors import ShoalError

    try:
        done = subprocess.run(
            ["ssh", "--", host, command], input=token + "\n", text=True, capture_output=True, timeout=60
        )
    except FileNotFoundError:
        raise ShoalError("ssh is not installed here; leave --ssh out and run the command yourself") from None
    except subprocess.TimeoutExpired:
        raise ShoalError(
            f"ssh {host} does not answer; leave --ssh out and run the command yourself"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ShoalError(f"ssh {host} failed: {said[0]}")
