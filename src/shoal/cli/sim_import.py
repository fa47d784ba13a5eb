"""`shoal sim import`: a published trace in our own format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import polars as pl

    from shoal.sim.importers import Format

EXAMPLES = """
Formats: philly (cluster_job_log, JSON), philly-csv, helios, alibaba-pai, gavel, tiresias, elasticflow.

Examples:

  shoal sim import philly cluster_job_log --profiles profiles.csv -o jobs.csv

  shoal sim import philly-csv philly.csv --vc 2869ce --profiles profiles.csv -o jobs.csv

  shoal sim import gavel jobs.trace --throughputs throughputs.json --profiles-out profiles.csv -o jobs.csv

  shoal sim import helios Venus/cluster_log.csv --gpus 64 --skip-bad -o venus.parquet
"""


def import_(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="Which format the trace has.")],
    trace: Annotated[Path, typer.Argument(help="The trace.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the jobs (.csv or .parquet).")],
    profiles: Annotated[
        Path | None, typer.Option(help="profiles.csv with the models. Default: the built-in sample.")
    ] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="The format's own speeds (gavel, elasticflow), instead of profiles.")
    ] = None,
    profiles_out: Annotated[
        Path | None, typer.Option(help="Where to write the profiles made from --throughputs.")
    ] = None,
    vc: Annotated[list[str] | None, typer.Option(help="Only this virtual cluster; repeat for more.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Leave out jobs that ask for more GPUs.")] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="GPU type on which the trace's durations count. Default: the first.")
    ] = None,
    assign: Annotated[
        bool, typer.Option("--assign", help="Draw models from the profiles though the trace names its own.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Go on without malformed rows.")] = False,
    seed: Annotated[int, typer.Option(help="Of the models drawn for jobs without one.")] = 0,
) -> None:
    """Convert a published trace. Jobs without a model get one that runs at their size, at random."""
    from shoal.cli.sim_summary import show_jobs
    from shoal.core.errors import ShoalError
    from shoal.sim.importers import Wishes, convert, format_named
    from shoal.sim.inputs import profiles_of, read_profiles, write_jobs, write_profiles
    from shoal.sim.samples import sample_path

    if not 0 <= seed < 2**32:
        raise ShoalError(f"the seed must be 0 to {2**32 - 1}, not {seed}")
    form = format_named(format_)
    made = _made_profiles(form, profiles, throughputs, profiles_out)
    path = profiles or sample_path("profiles.csv")
    wishes = Wishes(seed, tuple(vc or ()), gpus, gpu_type, assign, skip_bad)
    known = read_profiles(path) if made is None else profiles_of(made)
    result = convert(form.read(trace), known, wishes)
    notes = list(result.notes)
    if made is not None and profiles_out is not None:
        write_profiles(profiles_out, made)
        path = profiles_out
    if profiles is None:
        notes.append(f"the models are those of {path}: pass it as --profiles")
    write_jobs(out, result.jobs)
    left_out = dict(result.left_out)
    if result.bad:
        first = result.bad[0]
        left_out[f"malformed, the first on {result.place} {first.line}: {first.message}"] = len(result.bad)
    show_jobs(out, result.jobs, left_out=left_out, notes=notes)


import_.__doc__ = f"{import_.__doc__}\n{EXAMPLES}"


def _made_profiles(
    form: Format, profiles: Path | None, throughputs: Path | None, profiles_out: Path | None
) -> pl.DataFrame | None:
    """Profiles made from the format's own throughputs; None where a file of profiles is used."""
    from shoal.core.errors import ShoalError

    if throughputs is None:
        if profiles_out is not None:
            raise ShoalError("--profiles-out needs --throughputs, from which the profiles are made")
        return None
    if form.profiles is None:
        raise ShoalError(f"{form.name} has no throughputs of its own; give --profiles instead")
    if profiles is not None or profiles_out is None:
        raise ShoalError(
            "--throughputs takes the place of --profiles, and needs --profiles-out for the result"
        )
    return form.profiles(throughputs)
