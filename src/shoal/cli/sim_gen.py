"""`shoal sim gen`: generate a synthetic trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.extras import require

if TYPE_CHECKING:
    from shoal.sim.generate import Arrivals


@click.command()
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to write the trace (.csv or .parquet).",
)
@click.option("-n", "--jobs", type=int, default=1000, help="Number of jobs.")
@click.option("--gpus", type=int, default=64, help="GPUs of the cluster to which the load refers.")
@click.option(
    "--load", type=float, default=0.9, help="Requested GPU-seconds over (GPUs x time from first to last job)."
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "diurnal", "bursty"]),
    default="poisson",
    help="Arrival process.",
)
@click.option(
    "--users",
    default="20",
    help="Number of users, or their names: 20, or ada,ben. User k submits in proportion to 1/k.",
)
@click.option("--sizes", help="Requested GPUs and their frequencies: 1:0.8,8:0.2. Default: those of Philly.")
@click.option(
    "--profiles",
    type=click.Path(path_type=Path),
    help="profiles.csv with the models. Default: the built-in sample.",
)
@click.option("--gpu-type", help="GPU type to which durations refer. Default: a type that all models run on.")
@click.option(
    "--longest-days", type=float, default=57.87, help="Maximum duration of a job at its requested size."
)
@click.option("--seed", type=int, default=0, help="The same seed gives the same trace.")
def gen(
    out: Path,
    jobs: int,
    gpus: int,
    load: float,
    arrivals: Arrivals,
    users: str,
    sizes: str | None,
    profiles: Path | None,
    gpu_type: str | None,
    longest_days: float,
    seed: int,
) -> None:
    """Generate a trace: heavy-tailed durations and sizes like Microsoft's Philly cluster, at a given load.

    \b
    Examples:
      shoal sim gen -o jobs.csv
      shoal sim gen --jobs 100000 --gpus 2490 --load 0.9 --arrivals diurnal --seed 1 -o big.parquet
      shoal sim gen --profiles mine.csv --sizes 1:0.5,4:0.3,8:0.2 --users ada,ben,cho -o mix.csv
    """
    require("shoal sim gen", "sim")
    import numpy as np

    from shoal.cli.sim_summary import show_jobs
    from shoal.core.errors import ShoalError
    from shoal.sim.generate import DAY_S, PHILLY_SIZES, Recipe, generate
    from shoal.sim.inputs import check_not_read, check_table_name, check_writable, read_profiles, write_jobs
    from shoal.sim.samples import sample_path

    if seed < 0:
        raise ShoalError(f"the seed must not be negative, not {seed}")
    recipe = Recipe(
        jobs=jobs,
        gpus=gpus,
        load=load,
        arrivals=arrivals,
        users=_users(users),
        sizes=PHILLY_SIZES if sizes is None else _sizes(sizes),
        longest_s=longest_days * DAY_S,
        gpu_type=gpu_type,
    )
    check_writable(out)
    check_not_read(out, [profiles])
    check_table_name(out)
    known = read_profiles(profiles or sample_path("profiles.csv"))
    trace = generate(recipe, known, np.random.default_rng(seed))
    write_jobs(out, trace)
    notes = (
        []
        if profiles
        else [
            "the models are those of the built-in profiles, which `shoal sim run` uses without --profiles"
            " if the trace's directory has no profiles.csv"
        ]
    )
    without = [model for model, profile in known.items() if gpu_type and not profile.knows(gpu_type)]
    if without:
        notes.append(f"not used, as they have no speed on {gpu_type}: {', '.join(without)[:200]}")
    gone = sorted(set(recipe.sizes) - set(trace["requested_gpus"].unique().to_list()))
    if gone:
        notes.append(f"no job of {', '.join(map(str, gone))} GPUs: too large here, or too rare to be drawn")
    show_jobs(out, trace, notes=notes)


def _users(text: str) -> tuple[str, ...]:
    """`20` or `ada,ben,cho`."""
    import re

    from shoal.core.errors import ShoalError

    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        count = int(text)
        if not 1 <= count <= 1_000_000:
            raise ShoalError(f"--users: give 1 to 1,000,000 users, not {count}")
        return tuple(f"user{i}" for i in range(1, count + 1))
    named = tuple(name.strip() for name in text.split(","))
    if not all(named):
        raise ShoalError(f"--users: {text!r} has an empty name; write ada,ben,cho")
    return named


def _sizes(text: str) -> dict[int, float]:
    """`1:0.8,8:0.2`."""
    from shoal.core.errors import ShoalError

    try:
        pairs = [part.split(":") for part in text.split(",")]
        shares = {int(size): float(share) for size, share in pairs}
    except ValueError:
        raise ShoalError(f"--sizes: {text!r} is not a list of size:share, such as 1:0.8,8:0.2") from None
    if len(shares) < len(pairs):
        raise ShoalError(f"--sizes: {text!r} gives a size twice")
    return shares
