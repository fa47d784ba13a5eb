"""`shoal shares`: each user's GPUs and fair share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.options import on_server, output_option
from shoal.cli.out import Output
from shoal.core.words import counted

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Share


@click.command()
@click.option(
    "--over", help="Only this period before now: 24h, 7d. Default: since the server began to record."
)
@output_option
@on_server
def shares(client: Client, output: Output, over: str | None) -> None:
    """Show the fairness ledger: what each user holds and is entitled to now, and received and lent so far."""
    from shoal.cli.columns import print_table
    from shoal.cli.out import duration, say
    from shoal.cli.report import print_document
    from shoal.cli.times import ago
    from shoal.cli.times import since as point

    found = client.shares(since=point(over))
    if not output.for_people:
        print_document(output, found, [share.user for share in found.items])
        return
    if not found.items:
        say("no user has had a job yet")
        return
    rows = [
        [
            s.user,
            f"{s.tickets:g}",
            f"{s.gpus} of {s.entitled_gpus:.3g}" + (f", {s.unused_gpus} unused" if s.unused_gpus else ""),
            "-" if s.running_jobs is None else f"{s.running_jobs}/{s.pending_jobs}",
            *(duration(x) for x in (s.entitled_gpu_s, s.received_gpu_s, s.lent_gpu_s, s.borrowed_gpu_s)),
            ", ".join(_traded(s)) or "-",
        ]
        for s in found.items
    ]
    rows.append(["(idle)", "", str(found.idle_gpus), "", "", duration(found.idle_gpu_s), "", "", ""])
    head = ["USER", "TICKETS", "GPUS NOW", "RUN/WAIT", "DUE", "RECEIVED", "LENT", "BORROWED", "TRADED"]
    print_table(head, rows, wide=output is Output.WIDE)
    whole = f"RECEIVED and idle time are {duration(found.capacity_gpu_s)} together"
    say(f"GPU time since {ago(found.since)} ago, {counted(found.total_gpus, 'GPU')}: {whole}")


def _traded(share: Share) -> list[str]:
    """What the user bought, then what it sold for that."""
    from shoal.cli.out import duration

    found = sorted(share.traded_by_type_gpu_s.items(), key=lambda item: -item[1])
    return [f"{'+' if gpu_s > 0 else '-'}{duration(abs(gpu_s))} {gpu_type}" for gpu_type, gpu_s in found]
