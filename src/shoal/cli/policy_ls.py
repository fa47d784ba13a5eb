"""`shoal policy ls`."""

from __future__ import annotations

from typing import Annotated

import typer


def ls(output: Annotated[str, typer.Option("-o", "--output", help="table or json.")] = "table") -> None:
    """The policies that can be named, one line each."""
    from shoal.cli.out import print_json, table
    from shoal.policies.registry import policy_classes

    rows = policy_classes().items()
    if output == "json":
        print_json(
            {
                "items": [{"name": n, "summary": p.summary, "elastic": p.elastic} for n, p in rows],
                "next": None,
            }
        )
        return
    table(
        ["policy", "resizes jobs", "needs lengths", "what it does"],
        [[n, "yes" if p.elastic else "no", "yes" if p.needs_lengths else "no", p.summary] for n, p in rows],
    )
