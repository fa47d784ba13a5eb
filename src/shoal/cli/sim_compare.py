"""`shoal sim compare`: run several policies over one trace, on all cores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli import sim_options as so
from shoal.cli.extras import require
from shoal.cli.out import print_json, say
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.cli.sim_processes import Outcome

DEFAULT_POLICIES = ("fifo", "srtf", "tiresias-l", "max-min", "themis", "optimus", "afs-l", "afs-p")


@click.command()
@so.common_options
@click.option(
    "--policies",
    "--policy",
    multiple=True,
    default=[",".join(DEFAULT_POLICIES)],
    help="Policies to compare, comma-separated or repeated.",
)
@click.option(
    "--placement",
    "--placements",
    multiple=True,
    default=["auto"],
    help="Placements to compare, comma-separated; `shoal sim run --help` names them.",
)
@click.option(
    "--costs",
    multiple=True,
    default=["none"],
    help="Cost models to compare, comma-separated: none, restart, concurrent, suspend.",
)
@click.option(
    "--knowledge",
    multiple=True,
    default=["true"],
    help="Knowledge to compare, comma-separated: true, wrong:ERROR, learned:NOISE:EXPLORED.",
)
@click.option(
    "--autoscale",
    multiple=True,
    help="As for `shoal sim run`. Repeat it to compare, `none` is without: --autoscale none "
    "--autoscale efficiency:threshold=0.5.",
)
@click.option("--report", type=so.FILE, help="Write one self-contained HTML page to this file.")
@so.output_option
@click.option("--workers", type=click.IntRange(min=1), help="Processes. Default: one per core.")
@reported
def compare(
    given: so.Given,
    policies: tuple[str, ...],
    placement: tuple[str, ...],
    costs: tuple[str, ...],
    knowledge: tuple[str, ...],
    autoscale: tuple[str, ...],
    report: Path | None,
    output: str,
    workers: int | None,
) -> None:
    """Run several policies over one trace, side by side. An --option applies to every policy that has it.

    \b
    Examples:
      shoal sim compare --sample
      shoal sim compare jobs.csv -p profiles.csv --gpus 64 --policies fifo,afs-l,afs-p --report out.html
      shoal sim compare jobs.csv -p profiles.csv --gpus 64 --policies afs-p --costs none,restart,concurrent
      shoal sim compare --sample --policies afs-l,optimus --knowledge true,learned,wrong:0.2,wrong:0.5
      shoal sim compare jobs.csv -p profiles.csv -c cluster.yaml --policies afs-p --placement auto,moving,liquid
    """
    require("shoal sim compare", "sim")
    from shoal.cli.sim_processes import run_all
    from shoal.core.errors import ShoalError
    from shoal.sim.runner import check, load, remarks

    names, kinds = _words("--policies", policies), _words("--costs", costs)
    so.check_costs(kinds, given)
    setups = []
    searches = ["" if word == "none" else word for word in _each_once("--autoscale", autoscale or [""])]
    varied = itertools.product(
        kinds, _words("--knowledge", knowledge), _words("--placement", placement), searches
    )
    for kind, known, where, search in varied:
        setup = so.make_setup(
            given,
            policy=names[0] if names else "",
            costs=kind,
            knowledge=known,
            placement=where,
            autoscale=search,
        )
        setups += [replace(setup, policy=name, options=_options_of(name, setup.options)) for name in names]
    _check_options(names, so.parse_options(given.option))
    if not setups:
        raise ShoalError("name at least one each of --costs, --knowledge and --placement")
    if report:
        _check_report(report, so.files_read(setups[0], given.option))
    inputs = load(setups[0])  # finds mistakes in the files once, before any run
    for setup in setups:
        check(setup, inputs.cluster)
    for line in dict.fromkeys(line for setup in setups for line in remarks(setup, inputs)):
        say(line)
    outcome = run_all(setups, label_all(setups), len(inputs.jobs), workers, with_series=report is not None)
    _tell(outcome, output, report)


def _check_report(report: Path, read: list[Path | None]) -> None:
    """Check before the runs that the report can be written."""
    from shoal.core.errors import ShoalError
    from shoal.sim.inputs import check_not_read, check_writable

    check_writable(report)
    check_not_read(report, read)
    if report.suffix not in (".html", ".htm") and report.parent != Path("/dev"):
        raise ShoalError(f"--report {report}: a report is an HTML page; its name must end in .html")


def _tell(outcome: Outcome, output: str, report: Path | None) -> None:
    """Print the outcome of the runs. Failures come last and decide the exit code."""
    from shoal.cli.sim_processes import RunsFailed
    from shoal.cli.sim_ranking import show
    from shoal.core.words import counted
    from shoal.sim.interrupts import stop

    if report and outcome.results:
        _write_report(report, outcome)
    summaries = [r["summary"] for r in outcome.results]
    if output == "json":
        missing = {
            "not_begun": outcome.not_begun,
            "failed": [{"label": label, "message": why.message} for label, why in outcome.failed],
        }
        print_json(
            {"items": summaries, "next": None} | {name: runs for name, runs in missing.items() if runs}
        )
    elif summaries:
        show(summaries)
    for s in summaries:
        if not s["interrupted"] and s["finished"] < s["jobs"]:
            say(f"{s['label']}: {counted(s['jobs'] - s['finished'], 'job')} never ran: they got no share")
    failure = RunsFailed(outcome.failed) if outcome.failed else None
    if outcome.interrupted:
        say("; ".join([_closing_line(outcome), *([str(failure)] if failure else [])]))
        raise SystemExit(stop.exit_code)
    if failure:
        raise failure


def _write_report(report: Path, outcome: Outcome) -> None:
    from shoal.sim.inputs import write_aside
    from shoal.sim.report.page import render

    page = render([r["series"] for r in outcome.results], outcome.not_begun)
    with write_aside(report) as aside:
        aside.write_text(page, encoding="utf-8")
    say(f"report: {report} ({len(page.encode()) / 1e6:.1f} MB)")


def _closing_line(outcome: Outcome) -> str:
    """How many runs of an interrupted comparison are complete, partial or missing."""
    runs = len(outcome.results) + len(outcome.not_begun) + len(outcome.failed)
    cut = sum(r["summary"]["interrupted"] for r in outcome.results)
    line = f"interrupted: {len(outcome.results) - cut} of {runs} runs had ended"
    if cut:
        line += "; the figures of the others are partial and cannot be compared"
    if outcome.not_begun:
        line += f"; not begun: {', '.join(outcome.not_begun)}"
    return line


def _words(option: str, lists: Sequence[str]) -> list[str]:
    """The words of comma-separated lists, each once."""
    return _each_once(option, [word.strip() for word in ",".join(lists).split(",") if word.strip()])


def _each_once(option: str, words: Sequence[str]) -> list[str]:
    once = list(dict.fromkeys(words))
    for word in once:
        if words.count(word) > 1:
            say(f"{option}: {word} is given {words.count(word)} times and runs once")
    return once


def _fields(policy: str) -> set[str]:
    import dataclasses

    from shoal.policies.registry import policy_class

    return {f.name for f in dataclasses.fields(policy_class(policy).Options)}


def _options_of(policy: str, options: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in options.items() if k in _fields(policy)}


def _check_options(policies: list[str], options: dict[str, str]) -> None:
    """Refuse an option that none of the policies has."""
    from shoal.core.errors import ShoalError, did_you_mean

    if not policies:
        raise ShoalError("name at least one policy: --policies afs-l,afs-p")
    known = set().union(*(_fields(p) for p in policies))
    for name in options:
        if name not in known:
            raise ShoalError(f"none of these policies has an option {name!r}; {did_you_mean(name, known)}")


def label_all(setups: list[Any]) -> list[str]:
    """The policy's name, and its costs, knowledge and placement where they differ between runs."""
    costs_differ = len({s.costs.kind for s in setups}) > 1
    knowledge_differs = len({str(s.knowledge) for s in setups}) > 1
    placements_differ = len({s.placement for s in setups}) > 1
    searches_differ = len({s.autoscale for s in setups}) > 1
    labels = []
    for s in setups:
        parts = [s.policy]
        parts += [s.costs.kind] if costs_differ else []
        parts += [str(s.knowledge)] if knowledge_differs else []
        parts += [s.placement] if placements_differ else []
        parts += [s.autoscale or "none"] if searches_differ else []
        labels.append(" / ".join(parts))
    return labels
