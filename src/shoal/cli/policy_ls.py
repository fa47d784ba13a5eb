"""`shoal policy ls`."""

from __future__ import annotations

import click

from shoal.cli.extras import require
from shoal.cli.options import output_option
from shoal.cli.out import Output
from shoal.cli.report import reported


@click.command()
@output_option
@reported
def ls(output: Output) -> None:
    """List the policies, one line each.

    Policies that use lengths take them from the job or estimate them; `shoal profile JOB` shows the estimate.
    """
    require("shoal policy ls", "server", "sim")
    from shoal.cli.columns import print_table, wrapped
    from shoal.cli.out import room, say
    from shoal.cli.policy_show import shown
    from shoal.cli.report import print_document
    from shoal.policies.registry import policy_classes, unusable_policies
    from shoal.server.api.models import PolicyInfo, PolicyInfoList

    found = [
        PolicyInfo(name=name, summary=cls.summary, elastic=cls.elastic, needs_lengths=cls.needs_lengths)
        for name, cls in policy_classes().items()
    ]
    for line in unusable_policies():
        say(line)
    if not output.for_people:
        print_document(output, PolicyInfoList(items=found), [p.name for p in found])
        return
    rows = [[p.name, shown(p.elastic), shown(p.needs_lengths), p.summary] for p in found]
    head = ["POLICY", "RESIZES", "USES LENGTHS", "WHAT IT DOES"]
    width = None if output is Output.WIDE else room()
    print_table(head, wrapped(head, rows, width), wide=True)
