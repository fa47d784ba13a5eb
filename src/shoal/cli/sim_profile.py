"""`shoal sim profile`: make profiles.csv from measured placements."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.extras import require


@click.command()
@click.argument(
    "measured",
    nargs=-1,
    required=True,
    metavar="MODEL=FILE:BATCH...",
    help="Measured placements, and the global batch.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Where to write the profiles."
)
def profile(measured: tuple[str, ...], out: Path) -> None:
    """Make profiles of speed by GPUs and nodes from measurements in the format of Pollux's placements.csv.

    The file has `placement,local_bsz,step_time`: the GPUs on each node as digits, the batch of one GPU, seconds.

    \b
    Examples:
      shoal sim profile bert=bert/placements.csv:96 -o profiles.csv
      shoal sim profile bert=bert/placements.csv:96 cifar10=cifar10/placements.csv:512 -o profiles.csv
    """
    require("shoal sim profile", "sim")
    import polars as pl

    from shoal.cli.out import say
    from shoal.sim.inputs import check_not_read, check_table_name, check_writable, write_profiles
    from shoal.sim.inputs.placements_file import measured_profiles

    parts = [_parts(word) for word in measured]
    check_writable(out)
    check_not_read(out, [path for _, path, _ in parts])
    check_table_name(out)
    frames, notes = measured_profiles(parts)
    write_profiles(out, pl.concat(frames))
    for frame in frames:
        most, nodes = frame["gpus"].max(), frame["nodes"].max()
        say(f"{frame['model'][0]}: {len(frame)} points, up to {most} GPUs and {nodes} nodes")
    for note in notes:
        say(f"note: {note}")


def _parts(word: str) -> tuple[str, Path, float]:
    from shoal.core.errors import ShoalError

    model, _, rest = word.partition("=")
    path, _, batch = rest.rpartition(":")
    if not (model and path and batch):
        raise ShoalError(f"{word}: write MODEL=FILE:BATCH, such as bert=bert/placements.csv:96")
    try:
        value = float(batch)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ShoalError(f"{word}: {batch!r} is not a global batch")
    return model, Path(path), value
