"""`shoal show JOB`: the details of a job."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from shoal.cli.options import Connect, job_argument, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.server.api.models import Array, Event, Job, Worker


@click.command()
@job_argument
@click.option("-v", "--verbose", is_flag=True, help="Include the environment and all events.")
@output_option
@server_options
@reported
def show(connect: Connect, job: str, verbose: bool, output: Output) -> None:
    """Show what was submitted (and which values are defaults), the progress, the workers and the events.

    For the name of an array: how many of its jobs are in which state.
    """
    from shoal.cli.of_array import job_or_array
    from shoal.cli.report import print_document
    from shoal.server.api.models import Array

    with connect() as client:
        found = job_or_array(client, job)
        if isinstance(found, Array):
            _show_array(found, client.job(found.first).name, output)
            return
        if not output.for_people:
            print_document(output, found, found.name)
            return
        events = client.events(job=found.id, tail=None if verbose else 12)
    _describe(found, events, verbose=verbose)


def _show_array(array: Array, first: str, output: Output) -> None:
    from shoal.cli.of_array import states
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.core.words import counted

    if not output.for_people:
        print_document(output, array, array.name)
        return
    most = "" if array.max_running is None else f", at most {array.max_running} at once"
    print(f"{array.name} (array {array.id}, {array.user}): {counted(array.tasks, 'job')}{most}")
    print(f"  {states(array)}; {counted(array.gpus, 'GPU')} now")
    say(f"list them: shoal ps --array {array.name}   one of them: shoal show {first}")


def _describe(job: Job, events: list[Event], *, verbose: bool) -> None:
    from shoal.cli import jobs_table as t
    from shoal.cli.columns import print_table
    from shoal.cli.times import ago, clock

    print(f"{job.name} (job {job.id}, {job.user}): {job.state.value}")
    if t.reason(job):
        print(f"  {t.reason(job)}")
    print("\nSettings in force")
    for name, value in _spec(job, verbose=verbose):
        print(f"  {name:<18} {value}{'' if name in job.given else '   (default)'}")
    print("\nProgress")
    for name, value in _progress(job):
        print(f"  {name:<15} {value}")
    if job.workers:
        print("\nWorkers")
        rows = [
            [
                w.id,
                "-" if w.rank is None else str(w.rank),
                f"{w.node}:{','.join(map(str, w.gpus or [w.gpu]))}",
                w.state,
                _ended(w),
            ]
            for w in job.workers
        ]
        print_table(["  ID", "RANK", "GPU", "STATE", ""], [["  " + r[0], *r[1:]] for r in rows])
    print(f"\nEvents (submitted {ago(job.submitted_at)} ago)")
    for event in events:
        print(f"  {clock(event.at)}  {event.type:<18} {event.message}")


def _spec(job: Job, *, verbose: bool) -> list[tuple[str, str]]:
    from shoal.cli.jobs_table import want

    rows = [
        ("command", shlex.join(job.command)),
        ("workdir", job.workdir),
        ("gpus", want(job)),
        ("requested_gpus", str(job.requested_gpus)),
        ("resize", job.resize.value),
        ("gpu_types", ", ".join(job.gpu_types) or "any"),
        ("weight", f"{job.weight:g}"),
        ("max_restarts", str(job.max_restarts)),
        ("replace_stragglers", "yes" if job.replace_stragglers else "no"),
        ("grace_s", f"{job.grace_s:g}"),
    ]
    if job.array is not None:
        values = ", ".join(f"{key}={value}" for key, value in job.array.values.items())
        rows.append(
            ("array", f"{job.array.name}, task {job.array.index}" + (f" ({values})" if values else ""))
        )
    rows += _conditions(job)
    if job.autoscale:
        rows.append(("autoscale", job.autoscale))
    if job.target_loss is not None:
        rows.append(
            ("target loss", f"{job.target_loss:g}: it ends there, or with its last step if that is sooner")
        )
    if job.secrets:
        rows.append(("secrets", ", ".join(job.secrets)))
    if verbose:
        rows += [("env", f"{name}={value}") for name, value in sorted(job.env.items())]
    elif job.env:
        rows.append(("env", ", ".join(sorted(job.env))))
    return rows


def _conditions(job: Job) -> list[tuple[str, str]]:
    from shoal.cli.out import duration
    from shoal.cli.times import clock

    rows = [("priority", str(job.priority))]
    if job.labels:
        rows.append(("labels", ", ".join(f"{key}={value}" for key, value in sorted(job.labels.items()))))
    if job.after:
        rows.append(("after", ", ".join(f"{one.name} ({one.on.value})" for one in job.after)))
    for name, at in (("not_before", job.not_before), ("deadline", job.deadline)):
        rows += [] if at is None else [(name, clock(at))]
    if job.time_limit_s is not None:
        warn = f", SIG{job.warn_signal} {duration(job.warn_s)} before" if job.warn_signal else ""
        rows.append(("time_limit_s", f"{duration(job.time_limit_s)}{warn}"))
    elif job.warn_signal:
        rows.append(("warn", f"SIG{job.warn_signal} {duration(job.warn_s)} before its machine is taken away"))
    return rows


def _progress(job: Job) -> list[tuple[str, str]]:
    from shoal.cli.jobs_table import gpus, left
    from shoal.cli.out import duration
    from shoal.core.words import counted

    rows = [
        ("GPUs", gpus(job)),
        ("placement", ", ".join(f"{p.node} {p.gpus}" for p in job.placement) or "-"),
        ("generation", str(job.generation)),
        ("step", f"{job.step if job.step is not None else '-'} of {job.total_steps or 'unknown'}"),
        ("speed", f"{job.speed:.3g} steps/s" if job.speed is not None else "-"),
        ("speed-up", _speedup(job)),
        ("left", left(job)),
        ("waited", duration(job.waiting_s)),
        ("ran", duration(job.running_s)),
        ("paused", duration(job.paused_s)),
        ("stood still", f"{duration(job.stalled_s)} for {counted(job.resizes, 'resize')}"),
        ("restarts", str(job.restarts)),
    ]
    if job.remaining is not None and (job.remaining.basis or job.remaining.unknown):
        rows.append(("estimate", job.remaining.basis or f"unknown: {job.remaining.unknown}"))
    rows += [(name, f"{value:g}") for name, value in sorted(job.values.items())]
    if job.exit_code is not None or job.signal:
        rows.append(("ended with", job.signal or f"exit code {job.exit_code}"))
    return rows


def _place(worker: Worker) -> str:
    return f"{worker.node}:{','.join(map(str, worker.gpus or [worker.gpu]))}"


def _speedup(job: Job) -> str:
    if job.speedup is None:
        return "-"
    return f"{job.speedup:.2f}x, {'measured' if job.speedup_measured else 'an estimate'}"


def _ended(worker: object) -> str:
    code, signal = getattr(worker, "exit_code", None), getattr(worker, "signal", None)
    return signal or ("" if code is None else f"exit code {code}")
