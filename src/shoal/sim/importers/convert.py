"""Convert a published trace to the native format: order, models, iterations, and a report of what was omitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import InputError
from shoal.core.profile import Profile
from shoal.sim.importers.trace import BadRow, Trace, leave_out, only_clusters, refuse_bad_rows
from shoal.sim.inputs.column_values import ITERATIONS, SUBMIT_S
from shoal.sim.inputs.model_pool import ModelPool, assign_models, named_models
from shoal.sim.inputs.size_limits import no_profile


@dataclass(frozen=True)
class Conversion:
    """A native trace, and what happened to every row of the original."""

    jobs: pl.DataFrame
    rows: int
    left_out: Mapping[str, int]
    bad: tuple[BadRow, ...]
    notes: tuple[str, ...]
    #: The unit of the numbers of bad rows: "line", "row" or "record".
    place: str


@dataclass(frozen=True)
class Wishes:
    """The options of `shoal sim import`."""

    seed: int = 0
    #: Only these virtual clusters; empty for all.
    vcs: tuple[str, ...] = ()
    #: The largest request kept; None for any.
    gpus: int | None = None
    #: The GPU type for which the trace's durations hold; None for that of `common_type`.
    gpu_type: str | None = None
    #: Draw models from the profiles even if the trace names them.
    assign: bool = False
    skip_bad: bool = False
    #: The file of the profiles, for the error about a model without one.
    profiles_file: Path | None = None


def convert(trace: Trace, profiles: Mapping[str, Profile], wishes: Wishes | None = None) -> Conversion:
    """Convert a trace to native jobs.

    Jobs are ordered by submission (then by duration and size, as in the AFS evaluation), and times count from
    the first submission. A job without a model gets one by `assign_models`; its iterations follow from its
    service time at its requested size: iterations = service_s / seconds_per_iteration(requested). A job without
    a suitable model, or with less than one iteration, is omitted and counted.
    """
    wishes = wishes or Wishes()
    if not wishes.skip_bad:
        refuse_bad_rows(trace)
    if wishes.assign and "service_s" not in trace.jobs.columns:
        message = "its jobs count the steps of their own models, not seconds; omit --assign"
        raise InputError(message, file=str(trace.path))
    trace = only_clusters(trace, wishes.vcs)
    left_out = dict(trace.left_out)
    jobs = _in_order(trace.jobs)
    late = f"came more than {SUBMIT_S[1]:g} s after the first"
    jobs = leave_out(jobs, left_out, late, pl.col("submit_s") > SUBMIT_S[1])
    if wishes.gpus is not None:
        why = f"asked for more than {wishes.gpus} GPUs"
        jobs = leave_out(jobs, left_out, why, pl.col("requested_gpus") > wishes.gpus)
    pool = ModelPool.of(profiles, wishes.gpu_type)
    without = [model for model in profiles if model not in pool.models]
    jobs, bad = _with_models(jobs, pool, wishes, trace.model_field, without)
    if bad and not wishes.skip_bad:
        remedy = ", or draw models from the profiles with --assign" if "service_s" in jobs.columns else ""
        refuse_bad_rows(replace(trace, bad=bad), remedy=remedy)
    jobs = _with_work(jobs, pool, left_out, on_one_type=wishes.gpu_type is not None)
    if jobs.is_empty():
        if malformed := len(trace.bad) + len(bad):
            left_out[f"malformed ({(trace.bad + bad)[0].message})"] = malformed
        reasons = "; ".join(f"{count:,} {why}" for why, count in left_out.items()) or "the trace has no jobs"
        raise InputError(f"no job is left to write: {reasons}", file=str(trace.path))
    jobs, notes = _with_names(jobs)
    notes = trace.notes + notes
    if without:
        notes += (f"not used, as they have no speed on {wishes.gpu_type}: {', '.join(without)[:200]}",)
    return Conversion(_native(jobs), trace.rows, left_out, trace.bad + bad, notes, trace.place)


def _in_order(jobs: pl.DataFrame) -> pl.DataFrame:
    keys = [key for key in ("submit_s", "service_s", "requested_gpus") if key in jobs.columns]
    jobs = jobs.sort(keys, maintain_order=True)
    return jobs.with_columns(pl.col("submit_s") - pl.col("submit_s").min())


def _with_models(
    jobs: pl.DataFrame, pool: ModelPool, wishes: Wishes, model_field: str, without: Sequence[str]
) -> tuple[pl.DataFrame, tuple[BadRow, ...]]:
    """The jobs with the position of their model in the pool (-1: none fits); unknown names are bad rows.

    Models `without` a speed on the chosen GPU type are in the profiles but not in the pool.
    """
    requested = jobs["requested_gpus"].to_numpy()
    if "model" not in jobs.columns or wishes.assign:
        rng = np.random.RandomState(wishes.seed)
        drawn = assign_models(requested, pool, lambda below: rng.randint(0, below))
        return jobs.with_columns(pool=pl.Series(drawn)), ()
    found = jobs.with_columns(pool=pl.Series(named_models(jobs, pool)))
    unknown = found.filter(pl.col("pool") < 0)
    words = {
        model: f"{model!r} has no speed on GPUs of type {wishes.gpu_type!r}"
        if model in without
        else no_profile(model, pool.models, wishes.profiles_file)
        for model in unknown["model"].unique()
    }
    bad = tuple(
        BadRow(line, model_field, words[model])
        for line, model in unknown.select("line", "model").sort("line").iter_rows()
    )
    return found.filter(pl.col("pool") >= 0), bad


def _with_work(
    jobs: pl.DataFrame, pool: ModelPool, left_out: dict[str, int], *, on_one_type: bool
) -> pl.DataFrame:
    no_model = "asked for more GPUs than any model runs on"
    jobs = leave_out(jobs, left_out, no_model, pl.col("pool") < 0)
    model, gpus = jobs["pool"].to_numpy(), jobs["requested_gpus"].to_numpy()
    names = np.array(pool.models, dtype=object)[model].tolist()
    speed = pool.speed(model, gpus)
    by_time = "service_s" in jobs.columns
    jobs = jobs.with_columns(
        model=pl.Series(names, dtype=pl.String),
        speed=pl.Series(speed),
        runs=pl.Series(speed > 0 if by_time or on_one_type else pool.runs(model, gpus)),
        max_gpus=pl.Series(pool.largest[model]),
    )
    jobs = leave_out(jobs, left_out, "asked for a size their model has no speed for", ~pl.col("runs"))
    if by_time:
        jobs = jobs.with_columns(iterations=pl.col("service_s") * pl.col("speed"))
    jobs = leave_out(
        jobs, left_out, "would do more iterations than can be counted", pl.col("iterations") > ITERATIONS[1]
    )
    return leave_out(jobs, left_out, "would do less than one iteration", pl.col("iterations") < 1)


def _with_names(jobs: pl.DataFrame) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Jobs with names and users. Missing users become `unknown`, missing names job1, job2, ... by position.

    Names must be unique when the trace is read. If those of the trace are not, all of them are dropped.
    """
    notes: list[str] = []
    if "user" in jobs.columns and (missing := jobs["user"].null_count()):
        notes.append(f"{missing:,} jobs name no user: written as user 'unknown'")
        jobs = jobs.with_columns(pl.col("user").fill_null("unknown"))
    if "job" not in jobs.columns:
        return jobs, tuple(notes)
    if missing := jobs["job"].null_count():
        notes.append(
            f"{missing:,} jobs have no name: named by their position in the result (job1, job2, ...)"
        )
        by_place = pl.Series([f"job{i}" for i in range(1, jobs.height + 1)], dtype=pl.String)
        jobs = jobs.with_columns(job=pl.coalesce("job", by_place))
    same = jobs.filter(pl.col("job").is_duplicated())
    if same.height:
        notes.append(
            f"{same.height:,} jobs share their name with another ({same['job'][0][:40]!r} is one): "
            "no names are written, and a run calls them job1, job2, ..."
        )
        jobs = jobs.drop("job")
    return jobs, tuple(notes)


def _native(jobs: pl.DataFrame) -> pl.DataFrame:
    submit_s = jobs["submit_s"]
    whole = ((submit_s == submit_s.floor()) & (submit_s < 2**53)).all()
    columns = ["submit_s", "model", "iterations", "requested_gpus", "max_gpus"]
    columns += [name for name in ("job", "user", "weight") if name in jobs.columns]
    native = jobs.select(columns)
    return native.with_columns(pl.col("submit_s").cast(pl.Int64)) if whole else native
