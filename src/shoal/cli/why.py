"""`shoal why JOB`: why it waits or has no more GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.jobs_table import want
from shoal.cli.options import job_argument, on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Estimate, JobRef, Preemption, Why


@click.command()
@job_argument
@click.option("--at", help="Explain an earlier moment: 10m (ago), or a time.")
@click.option("--preempted", is_flag=True, help="Show which jobs last took GPUs from it, and by which rule.")
@click.option("-v", "--verbose", is_flag=True, help="Include the last decisions about the job.")
@output_option
@on_server
def why(client: Client, job: str, output: Output, at: str | None, preempted: bool, verbose: bool) -> None:
    """Explain why a job waits or has no more GPUs: the evidence, the jobs ahead, an estimate, and what would help."""
    from shoal.cli.of_array import one_job
    from shoal.cli.report import print_document
    from shoal.cli.times import since

    with one_job(client, job, "why", state="pending"):
        answer = client.why(job, at=since(at), preempted=preempted)
    if not output.for_people:
        print_document(output, answer, answer.reason.code if answer.reason else "None")
        return
    lines = explain(answer)
    if preempted:
        lines += taken(answer.preempted)
    if verbose:
        lines += _decisions(client, answer)
    print("\n".join(lines))


def taken(found: Preemption | None) -> list[str]:
    """Which jobs took its GPUs."""
    from shoal.cli.times import clock

    if found is None:
        return ["\nPreempted\n  never: no decision has given its GPUs to others"]
    lines = ["\nPreempted", f"  {clock(found.at)}: {found.sentence}"]
    lines += [f"  {_ref(ref)}" for ref in found.by]
    if found.reason is not None:
        lines.append(f"  {found.reason.code}: {found.reason.sentence}")
        lines += _evidence(found.reason.evidence, indent=4)
    return lines


def _decisions(client: Client, answer: Why) -> list[str]:
    from shoal.cli.times import clock

    events = client.events(job=answer.job.id, type="job.", tail=20)
    events = [event for event in events if answer.at is None or event.at <= answer.at]
    lines = ["\nWhat happened to it", *(f"  {clock(e.at)}  {e.type:<15} {e.message}" for e in events)]
    if answer.last_decision is not None:
        at = f" at {clock(answer.decided_at)}" if answer.decided_at is not None else ""
        lines.append(f"  the answer is that of decision {answer.last_decision}{at}")
    return lines


def _evidence(evidence: dict[str, float | int | str], indent: int = 2) -> list[str]:
    return [f"{' ' * indent}{key.replace('_', ' '):<24} {_number(v)}" for key, v in evidence.items()]


def explain(answer: Why) -> list[str]:
    """The answer as lines; empty parts are omitted."""
    name = answer.job.name or f"job {answer.job.id}"
    was = "is" if answer.at is None else f"at {answer.at.astimezone():%Y-%m-%d %H:%M:%S} was"
    had = "has" if answer.at is None else "had"
    state = f"{name} {was} {answer.job.state.value}, {_size(answer.job, had)} (policy {answer.policy})"
    if answer.reason is None:
        lines = [answer.sentence] if answer.at is None else [state, answer.sentence]
        return lines + ([f"\nDeadline\n  {answer.deadline}"] if answer.deadline is not None else [])
    lines = [state, f"{answer.reason.code}: {answer.reason.sentence}"]
    if answer.reason.evidence:
        lines.append("\nEvidence")
        lines += _evidence(answer.reason.evidence)
    if answer.ahead:
        more = answer.ahead_total - len(answer.ahead)
        head = "Who has the other GPUs" if answer.job.gpus else "Ahead of you"
        lines.append(f"\n{head} ({answer.ahead_total})")
        lines += [f"  {_ref(ref)}" for ref in answer.ahead]
        lines += [f"  and {more} more"] if more > 0 else []
    if answer.starts_in is not None:
        lines.append(f"\nWhen\n  {when(answer.starts_in)}")
    if answer.grows_in is not None:
        lines.append(f"\nWhen it may grow\n  {when(answer.grows_in)}")
    if answer.deadline is not None:
        lines.append(f"\nDeadline\n  {answer.deadline}")
    if answer.quantum is not None:
        lines.append(f"\nTurns\n  {answer.quantum}")
    if answer.could:
        lines.append("\nYou could")
        lines += [f"  {could.sentence}" for could in answer.could]
    return lines


def when(estimate: Estimate) -> str:
    """An estimated time with its basis, or why there is none."""
    from shoal.cli.out import duration

    if estimate.low_s is None and estimate.high_s is None:
        return f"unknown: {estimate.unknown or 'remaining times are not known'}"
    low, high = duration(estimate.low_s), duration(estimate.high_s)
    if estimate.high_s is None:
        length = f"in {low} or more"
    elif estimate.low_s == 0.0:
        length = f"within {high}"
    elif estimate.low_s is None or low == high:
        length = f"in about {high}"
    else:
        length = f"in {low} to {high}"
    return f"{length} ({estimate.basis})" if estimate.basis else length


def _size(job: JobRef, has: str = "has") -> str:
    wish = want(job)
    return f"{has} {job.gpus} of {wish} {'GPU' if wish == '1' else 'GPUs'}"


def _ref(job: JobRef) -> str:
    name = job.name or f"a job of {job.user}"
    return f"{name:<20} {job.user:<12} {job.state.value:<9} {_size(job)}"


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
