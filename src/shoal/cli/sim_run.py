"""`shoal sim run`: one policy over a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shoal.cli import sim_options as so
from shoal.cli.extras import require
from shoal.cli.out import decimal
from shoal.cli.report import reported


@click.command()
@so.common_options
@click.option("--policy", default="afs-p", help="The policy; `shoal policy ls` lists them.")
@click.option(
    "--placement",
    default="auto",
    help="How GPUs are chosen: auto, pool, keep-and-pack, node-or-whole-nodes, moving, optimus, liquid, "
    "liquid-batch, or your own. Options follow after colons: moving:horizon_s=600.",
)
@click.option(
    "--costs",
    default="none",
    help="What a change of its share costs a job: none, restart, concurrent or suspend.",
)
@click.option(
    "--knowledge",
    default="true",
    help="What the scheduler knows of speeds: true, wrong:ERROR or learned:NOISE:EXPLORED.",
)
@click.option(
    "--autoscale",
    default="",
    help="Search each job's size while it runs: efficiency:threshold=0.5, "
    "utility:worth=10,0:at_s=0,3600, or your own heuristic.",
)
@click.option("--per-job", type=so.FILE, help="Write one row per job to this file (.csv, .parquet).")
@so.output_option
@reported
def run(
    given: so.Given,
    policy: str,
    placement: str,
    costs: str,
    knowledge: str,
    autoscale: str,
    per_job: Path | None,
    output: str,
) -> None:
    """Run one policy over a trace in virtual time and print its figures.

    \b
    Examples:
      shoal sim run --sample --policy afs-l
      shoal sim run jobs.csv -p profiles.csv --gpus 64 --policy fifo --option backfill=no
      shoal sim run jobs.csv -p profiles.csv --cluster cluster.yaml --policy gandiva-fair -o json
      shoal sim run jobs.csv -p profiles.csv --cluster cluster.yaml --placement moving:horizon_s=600
    """
    require("shoal sim run", "sim")
    from shoal.cli.out import print_json, say
    from shoal.cli.sim_progress import Watch
    from shoal.core.words import counted
    from shoal.sim.inputs import check_not_read, check_table_name, check_writable
    from shoal.sim.interrupts import stop
    from shoal.sim.runner import load, remarks
    from shoal.sim.runner import run as run_one

    so.check_one_each(
        {"--policy": policy, "--costs": costs, "--knowledge": knowledge, "--placement": placement}
    )
    so.check_costs([costs], given)
    setup = so.make_setup(
        given, policy=policy, costs=costs, knowledge=knowledge, placement=placement, autoscale=autoscale
    )
    if per_job:
        check_writable(per_job)
        check_not_read(per_job, so.files_read(setup, given.option))
        check_table_name(per_job)
    inputs = load(setup)
    for line in remarks(setup, inputs):
        say(line)
    with Watch({policy: len(inputs.jobs)}) as watch:
        result = run_one(setup, watch.of(policy), inputs, watch.first_use)
    if per_job:
        write_per_job(per_job, result.record)
    if output == "json":
        print_json(result.summary)
    else:
        show(result.summary)
    if result.record.interrupted:
        say(f"interrupted: {result.summary['finished']:,} of {result.summary['jobs']:,} jobs had finished")
        raise SystemExit(stop.exit_code)
    never = result.summary["jobs"] - result.summary["finished"]
    if never:
        say(f"{counted(never, 'job')} never ran: they got no share")


def write_per_job(path: Path, record: Any) -> None:
    import polars as pl

    from shoal.sim.inputs import write_aside
    from shoal.sim.summary import per_job_rows

    frame = pl.DataFrame(per_job_rows(record), nan_to_null=True)  # it applies to arrays, not to lists
    with write_aside(path) as aside:
        if path.suffix == ".parquet":
            frame.write_parquet(aside)
        else:
            frame.write_csv(aside)


ROWS: tuple[tuple[str, str | Callable[[dict[str, Any]], str]], ...] = (
    ("jobs finished", lambda s: f"{s['finished']:,} of {s['jobs']:,}"),
    ("average completion", "avg_jct_s"),
    ("median completion", "p50_jct_s"),
    ("95th percentile", "p95_jct_s"),
    ("99th percentile", "p99_jct_s"),
    ("makespan", "makespan_s"),
    ("average wait", "avg_queue_s"),
    ("average standstill", "avg_paused_s"),
    ("GPUs in use", lambda s: f"{100 * s['utilization']:.1f} %"),
    ("share changes per job", lambda s: decimal(s["share_changes_per_job"], 2)),
    ("finish-time fairness, worst", lambda s: decimal(s["finish_time_fairness"]["max"], 2)),
    ("decisions", lambda s: f"{s['decisions']:,}"),
    ("took", "wall_s"),
)


def show(summary: dict[str, Any]) -> None:
    """Print what was run and its figures; for an interrupted run, also the time it reached."""
    from shoal.cli.fair_tables import show_fairness
    from shoal.cli.out import duration, table

    rows = []
    for label, what in ROWS:
        rows.append([label, duration(summary[what]) if isinstance(what, str) else what(summary)])
    reached = f" (to {duration(summary['simulated_s'])})" if summary["interrupted"] else ""
    print(what_was_run(summary))
    table([f"{summary['policy']}{reached}", ""], rows, right=[1])
    show_fairness(summary)


#: Defaults, which the description of a run omits.
USUAL = {"seed": 0, "knowledge": "true", "placement": "auto", "interpolate": "time"}
TOLD = ("placement", "knowledge", "autoscale", "needs", "servers", "interpolate", "seed")
FLAGS = ("auto_gpus", "share", "pre_schedule", "whole_seconds")


def what_was_run(summary: dict[str, Any]) -> str:
    """The policy, the trace, the cluster and every setting that is not the default, in one line."""
    from shoal.core.words import counted
    from shoal.sim.samples import sample_path

    setup = summary["setup"]
    trace = "the sample" if setup["jobs"] == str(sample_path("jobs.csv")) else setup["jobs"]
    parts = [
        f"{summary['policy']} on {trace}: {counted(summary['jobs'], 'job')}",
        setup.get("cluster") or counted(setup["gpus"], "GPU"),
        *(f"{name}={value}" for name, value in setup["options"].items()),
        *([f"costs {setup['costs']['kind']}"] if setup["costs"]["kind"] != "none" else []),
        *(f"{name} {setup[name]}" for name in TOLD if setup.get(name) not in (None, USUAL.get(name))),
        *(name.replace("_", "-") for name in FLAGS if setup.get(name)),
    ]
    return ", ".join(parts)
