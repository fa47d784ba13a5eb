"""`shoal notify`: be told of events of your jobs, by a signed webhook or in Slack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.options import on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client

COMMANDS = {
    "ls": ("shoal.cli.notify:ls", "List your webhooks and how they go."),
    "add": ("shoal.cli.notify:add", "Be told of events of your jobs at a URL."),
    "test": ("shoal.cli.notify:test", "Send a notification now."),
    "rm": ("shoal.cli.notify:rm", "Remove a webhook."),
}
GROUP = LazyGroup("notify", COMMANDS, "Notifications about your jobs: a signed webhook, or Slack.")
webhook_argument = click.argument("webhook", type=int, metavar="ID", help="Number of the webhook.")


@click.command()
@output_option
@on_server
def ls(client: Client, output: Output) -> None:
    """List your webhooks, what was sent, and the last error."""
    from shoal.cli.columns import print_table
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.server.api.models import WebhookList

    found = client.webhooks()
    if not output.for_people:
        print_document(output, WebhookList(items=found, next=None), [str(w.id) for w in found])
    elif not found:
        say("no webhooks; shoal notify add URL adds one")
    else:
        rows = [
            [
                str(w.id),
                w.user,
                w.format,
                ",".join(w.events),
                f"{w.sent}/{w.dropped}",
                w.url,
                w.last_error or "",
            ]
            for w in found
        ]
        head = ["ID", "USER", "FORMAT", "EVENTS", "SENT/DROPPED", "URL", "LAST ERROR"]
        print_table(head, rows, wide=output is Output.WIDE)


@click.command()
@click.argument("url", metavar="URL", help="https://...")
@click.option("--slack", is_flag=True, help="Send messages in Slack's format.")
@click.option(
    "--events", help="started,resized,preempted,failed,finished,idle. Default: failed,finished,idle."
)
@output_option
@on_server
def add(client: Client, url: str, output: Output, slack: bool, events: str | None) -> None:
    """Be told of events of your jobs at a URL. The key of the signatures is printed once."""
    from shoal.cli.out import say
    from shoal.cli.report import print_document

    words = None if events is None else [word.strip() for word in events.split(",") if word.strip()]
    made = client.create_webhook(url, format="slack" if slack else "json", events=words)
    if output.for_people:
        say(
            f"webhook {made.id} is notified of: {', '.join(made.events)}; try it: shoal notify test {made.id}"
        )
        if not slack:
            say("every request is signed with this key (docs/notify.md):")
            print(made.secret)
    else:
        print_document(output, made, str(made.id))


@click.command()
@webhook_argument
@output_option
@on_server
def test(client: Client, webhook: int, output: Output) -> None:
    """Send a notification now. Exit code 1 if it does not arrive."""
    from shoal.cli.out import say
    from shoal.cli.report import print_document

    found = client.test_webhook(webhook)
    if output.for_people:
        say(found.message)
    else:
        print_document(output, found, found.message)
    raise SystemExit(0 if found.arrived else 1)


@click.command()
@webhook_argument
@on_server
def rm(client: Client, webhook: int) -> None:
    """Remove a webhook."""
    from shoal.cli.out import say

    client.delete_webhook(webhook)
    say(f"removed webhook {webhook}")
