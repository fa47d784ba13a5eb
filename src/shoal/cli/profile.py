"""`shoal profile JOB`: its speed by number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.options import job_argument, on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Profile, SpeedPoint

BAR = 40


@click.command()
@job_argument
@click.option("--plot", is_flag=True, help="Draw a bar for each size.")
@output_option
@on_server
def profile(client: Client, job: str, output: Output, plot: bool) -> None:
    """Show the speed by number of GPUs, measured or estimated, what each further GPU adds, and the time left.

    Of a job that is over, what is on record: measurements of all jobs with its model.
    """
    from shoal.cli.of_array import one_job
    from shoal.cli.report import print_document

    with one_job(client, job, "profile"):
        found = client.profile(job)
    if output.for_people:
        print("\n".join(describe(found, plot=plot)))
    else:
        print_document(output, found, found.job.name or str(found.job.id))


def describe(profile: Profile, *, plot: bool) -> list[str]:
    from shoal.cli.columns import lines
    from shoal.cli.why import when

    head = [
        "GPUS",
        "STEPS/S",
        "90 % INTERVAL",
        "FIT",
        "SPEED-UP",
        "THE LAST ADDS",
        "BASIS",
        *([""] if plot else []),
    ]
    best = max((point.speed for point in profile.points), default=0.0)
    one = next((point for point in profile.points if point.gpus == 1), None)
    before, rows = None, []
    for point in profile.points:
        gain = f"{_mark(point, before)}{point.speed / before.speed - 1:+.0%}" if before else "-"
        speedup = f"{_mark(point, one)}{point.speed / one.speed:.2f}x" if one else "-"
        bar = ["#" * round(BAR * point.speed / best)] if plot else []
        here = " <- now" if point.gpus == profile.job.gpus else ""
        basis = ("measured" if point.measured else "estimated") + here
        high = "" if point.high_speed is None else f"{point.high_speed:.3g}"
        interval = "-" if point.low_speed is None else f"{point.low_speed:.3g} to {high}"
        fit = "-" if point.fitted_speed is None else f"{point.fitted_speed:.3g}"
        rows.append([str(point.gpus), f"{point.speed:.3g}", interval, fit, speedup, gain, basis, *bar])
        before = point
    table = lines(head, rows) if rows else []
    if profile.job.state.is_final:
        return [*table, f"speeds: {profile.basis}", "left: nothing, the job is over"]
    now = profile.measuring or profile.next_measurement
    told = [f"speeds: {profile.basis}", f"to measure: {now}", f"left: {when(profile.remaining)}"]
    return [*table, *(told if profile.points else [told[0], told[2]])]


def _mark(*points: SpeedPoint) -> str:
    """`~` for a figure that comes from an estimated speed."""
    return "" if all(point.measured for point in points) else "~"
