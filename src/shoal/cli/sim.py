"""`shoal sim`: the simulator's commands."""

from __future__ import annotations

from typing import Any

import click

from shoal.cli.lazy import LazyGroup
from shoal.sim.interrupts import stoppable

COMMANDS = {
    "run": ("shoal.cli.sim_run:run", "Run one policy over a trace and print its figures."),
    "compare": ("shoal.cli.sim_compare:compare", "Run several policies over a trace, side by side."),
    "gen": ("shoal.cli.sim_gen:gen", "Generate a synthetic trace."),
    "import": ("shoal.cli.sim_import:import_", "Convert a published trace to Shoal's format."),
    "profile": ("shoal.cli.sim_profile:profile", "Make profiles by GPUs and nodes from measured placements."),
    "paper": (
        "shoal.cli.sim_paper:paper",
        "Run the experiments of a paper and print our figures next to the paper's.",
    ),
}


class Simulator(LazyGroup):
    """Its commands end in the same way by Ctrl-C, SIGTERM and SIGHUP: they print the results so far."""

    def invoke(self, ctx: click.Context) -> Any:
        with stoppable():
            return super().invoke(ctx)


GROUP = Simulator(
    "sim", COMMANDS, "Simulate a cluster in virtual time, with the decision code of the live system."
)
