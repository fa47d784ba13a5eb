"""`shoal why JOB`: why it has what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cli.options import Home, JobArg, Out, Output, Server, TokenFile
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.server.models import Estimate, JobRef, Why


@reported
def why(
    job: JobArg,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Why a job waits or is not larger: a sentence, the evidence, who is ahead, when, and what would help."""
    from shoal.cli.options import connect
    from shoal.cli.report import print_document

    with connect(home, server, token_file) as client:
        answer = client.why(job)
    if output.for_people:
        print("\n".join(explain(answer)))
    else:
        print_document(output, answer, answer.reason.code if answer.reason else "None")


def explain(answer: Why) -> list[str]:
    """The answer as lines; what there is nothing to say about is left out."""
    code = f"{answer.reason.code}: " if answer.reason else ""
    name = answer.job.name or f"job {answer.job.id}"
    lines = [f"{name} is {answer.job.state.value}, {_size(answer.job)} (policy {answer.policy})"]
    lines.append(f"{code}{answer.sentence}")
    if answer.reason and answer.reason.evidence:
        lines.append("\nEvidence")
        lines += [f"  {key.replace('_', ' '):<24} {_number(v)}" for key, v in answer.reason.evidence.items()]
    if answer.ahead:
        more = answer.ahead_total - len(answer.ahead)
        lines.append(f"\nAhead of you ({answer.ahead_total})")
        lines += [f"  {_ref(ref)}" for ref in answer.ahead]
        lines += [f"  and {more} more"] if more > 0 else []
    if answer.starts_in is not None:
        lines.append(f"\nWhen\n  {when(answer.starts_in)}")
    if answer.could:
        lines.append("\nYou could")
        lines += [f"  {could.sentence}" for could in answer.could]
    return lines


def when(estimate: Estimate) -> str:
    """An interval with its basis, or why there is none."""
    from shoal.cli.out import duration

    if estimate.low_s is None and estimate.high_s is None:
        return f"unknown: {estimate.unknown or 'remaining times are not known'}"
    low, high = duration(estimate.low_s), duration(estimate.high_s)
    if estimate.high_s is None:
        length = f"in {low} or more"
    elif estimate.low_s is None or low == high:
        length = f"in about {high}"
    else:
        length = f"in {low} to {high}"
    return f"{length} ({estimate.basis})" if estimate.basis else length


def _size(job: JobRef) -> str:
    wish = str(job.max_gpus) if job.min_gpus == job.max_gpus else f"{job.min_gpus}..{job.max_gpus}"
    return f"has {job.gpus} of {wish} GPUs"


def _ref(job: JobRef) -> str:
    name = job.name or f"a job of {job.user}"
    return f"{name:<20} {job.user:<12} {job.state.value:<9} {_size(job)}"


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
