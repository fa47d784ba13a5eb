"""`shoal sim import`: convert a published trace to Shoal's format."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.extras import require

if TYPE_CHECKING:
    from shoal.sim.importers import Format


@click.command("import")
@click.argument("format_", metavar="FORMAT", help="Format of the trace.")
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE", help="The trace.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to write the jobs (.csv or .parquet).",
)
@click.option(
    "--profiles",
    type=click.Path(path_type=Path),
    help="profiles.csv with the models. Default: the built-in sample.",
)
@click.option(
    "--throughputs",
    type=click.Path(path_type=Path),
    help="The format's own speeds (gavel, elasticflow), instead of profiles.",
)
@click.option(
    "--profiles-out",
    type=click.Path(path_type=Path),
    help="Where to write the profiles made from --throughputs.",
)
@click.option("--vc", multiple=True, help="Only this virtual cluster; repeat for more.")
@click.option("--gpus", type=int, help="Leave out jobs that request more GPUs than this.")
@click.option(
    "--gpu-type",
    help="GPU type to which durations refer and on which jobs must run. Default: a type that all models run on; any.",
)
@click.option("--assign", is_flag=True, help="Draw models from the profiles even if the trace names models.")
@click.option("--skip-bad", is_flag=True, help="Skip malformed rows.")
@click.option("--seed", type=int, default=0, help="Seed for the models drawn for jobs without one.")
def import_(
    format_: str,
    trace: Path,
    out: Path,
    profiles: Path | None,
    throughputs: Path | None,
    profiles_out: Path | None,
    vc: tuple[str, ...],
    gpus: int | None,
    gpu_type: str | None,
    assign: bool,
    skip_bad: bool,
    seed: int,
) -> None:
    """Convert a published trace. A job without a model gets a random one that runs at its size.

    Formats: philly (cluster_job_log, JSON), philly-csv, helios, alibaba-pai, gavel, tiresias, elasticflow.

    \b
    Examples:
      shoal sim import philly cluster_job_log --profiles profiles.csv -o jobs.csv
      shoal sim import philly-csv philly.csv --vc 2869ce --profiles profiles.csv -o jobs.csv
      shoal sim import gavel jobs.trace --throughputs throughputs.json --profiles-out profiles.csv -o jobs.csv
      shoal sim import helios Venus/cluster_log.csv --gpus 64 --skip-bad -o venus.parquet
    """
    require("shoal sim import", "sim")
    from shoal.cli.sim_summary import show_jobs
    from shoal.core.errors import ShoalError
    from shoal.sim.importers import Wishes, convert, format_named
    from shoal.sim.inputs import jobs_table, profiles_of, profiles_table, read_profiles, write_tables
    from shoal.sim.samples import sample_path

    if not 0 <= seed < 2**32:
        raise ShoalError(f"the seed must be 0 to {2**32 - 1}, not {seed}")
    if gpus is not None and gpus < 1:
        raise ShoalError(f"--gpus: give the largest request to keep, 1 or more, not {gpus}")
    form = format_named(format_)
    _check_wish_for_profiles(form, profiles, throughputs, profiles_out)
    speeds = form.reads_speeds(throughputs) if throughputs else ()
    _check_outputs(out, profiles_out, [*form.reads(trace), profiles, *speeds])
    made = form.profiles(throughputs) if form.profiles and throughputs else None
    path = profiles or sample_path("profiles.csv")
    wishes = Wishes(seed, tuple(vc or ()), gpus, gpu_type, assign, skip_bad, throughputs or path)
    known = read_profiles(path) if made is None else profiles_of(made.frame)
    result = convert(form.read(trace), known, wishes)
    notes = list(result.notes)
    tables: dict[str | Path, Any] = {out: jobs_table(result.jobs)}
    if made is not None and profiles_out is not None:
        tables = {profiles_out: profiles_table(made.frame), **tables}
        notes += made.notes
        path = profiles_out
    if profiles is None:
        notes.append(f"the models are those of {path}: pass it as --profiles")
    write_tables(tables)
    left_out = dict(result.left_out)
    for table, bad in itertools.groupby(result.bad, lambda row: row.beside):
        rows = list(bad)
        where = f"{result.place} {rows[0].line}" + (f" of {table.name}" if table else "")
        left_out[f"malformed, the first on {where}: {rows[0].message}"] = len(rows)
    show_jobs(out, result.jobs, left_out=left_out, notes=notes)


def _check_wish_for_profiles(
    form: Format, profiles: Path | None, throughputs: Path | None, profiles_out: Path | None
) -> None:
    """Accept either profiles, or the format's own throughputs and a file for the profiles made from them."""
    from shoal.core.errors import ShoalError

    if throughputs is None:
        if profiles_out is not None:
            raise ShoalError("--profiles-out needs --throughputs, from which the profiles are made")
        return
    if form.profiles is None:
        raise ShoalError(f"{form.name} has no throughputs of its own; give --profiles instead")
    if profiles is not None or profiles_out is None:
        raise ShoalError(
            "--throughputs takes the place of --profiles, and needs --profiles-out for the result"
        )


def _check_outputs(out: Path, profiles_out: Path | None, inputs: list[Path | None]) -> None:
    """Check before the work that both files can be written, differ, and are not read."""
    from shoal.core.errors import ShoalError
    from shoal.sim.inputs import check_not_read, check_table_name, check_writable

    for path in (out, profiles_out):
        if path is not None:
            check_writable(path)
            check_not_read(path, inputs)
            check_table_name(path)
    if profiles_out is not None and out.absolute() == profiles_out.absolute():
        raise ShoalError(f"-o and --profiles-out are both {out}; give them different names")
