"""`shoal sim compare`: several policies over one trace, on all cores."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli import sim_options as so

DEFAULT_POLICIES = "fifo,srtf,tiresias-l,max-min,themis,optimus,afs-l,afs-p"

#: How often a run tells how far it is, and hears whether to go on: each time is a message to another process.
_EVERY_S = 0.1

EXAMPLES = """\b
Examples:
  shoal sim compare --sample
  shoal sim compare jobs.csv -p profiles.csv --gpus 64 --policies fifo,afs-l,afs-p --report out.html
  shoal sim compare jobs.csv -p profiles.csv --gpus 64 --policies afs-p --costs none,restart,concurrent
  shoal sim compare --sample --policies afs-l,optimus --knowledge true,learned,wrong:0.2,wrong:0.5
  shoal sim compare jobs.csv -p profiles.csv -c cluster.yaml --policies afs-p --placement auto,moving,liquid
"""


def compare(
    jobs: so.Jobs = None,
    policies: Annotated[
        str, typer.Option("--policies", "--policy", help="Comma-separated.")
    ] = DEFAULT_POLICIES,
    profiles: so.Profiles = None,
    gpus: so.Gpus = None,
    cluster: so.ClusterFile = None,
    option: so.Option = None,
    placement: Annotated[
        str,
        typer.Option(
            "--placement",
            "--placements",
            help="Placements to compare, comma-separated; `shoal sim run --help` names them.",
        ),
    ] = "auto",
    seed: so.Seed = 0,
    costs: Annotated[
        str,
        typer.Option(
            "--costs", help="Cost models to compare, comma-separated: none, restart, concurrent, suspend."
        ),
    ] = "none",
    restart_s: so.RestartS = None,
    prepare_s: so.PrepareS = None,
    pause_s: so.PauseS = None,
    knowledge: Annotated[
        str, typer.Option(help="Knowledge to compare, comma-separated: true, wrong:ERROR, learned:NOISE.")
    ] = "true",
    whole_seconds: so.WholeSeconds = False,
    interpolate: so.Interpolate = "time",
    auto_gpus: so.AutoGpus = False,
    autoscale: Annotated[
        list[str] | None,
        typer.Option(
            help="As of `shoal sim run`; repeat it to compare, `none` is without: --autoscale none "
            "--autoscale efficiency:threshold=0.5."
        ),
    ] = None,
    needs: so.Needs = None,
    share: so.Share = False,
    pre_schedule: so.PreSchedule = False,
    servers: so.Servers = "beside",
    report: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page here.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json.")] = "table",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.")] = None,
    sample: so.Sample = False,
) -> None:
    """Run several policies over one trace, side by side. An --option holds for every policy that has it."""
    so.check_output(output)
    from shoal.cli.out import print_json, say
    from shoal.core.errors import ShoalError
    from shoal.core.words import counted

    names = _words(policies)
    so.check_costs(_words(costs), restart_s, prepare_s, pause_s)
    setups = []
    searches = ["" if word == "none" else word for word in dict.fromkeys(autoscale or [""])]
    varied = itertools.product(_words(costs), _words(knowledge), _words(placement), searches)
    for kind, known, where, search in varied:
        setup = so.setup(
            names[0] if names else "", jobs, profiles, gpus, cluster, sample,
            option=option, seed=seed, costs=kind, restart_s=restart_s, prepare_s=prepare_s, pause_s=pause_s,
            knowledge=known, placement=where, whole_seconds=whole_seconds, interpolate=interpolate,
            auto_gpus=auto_gpus, autoscale=search, needs=needs, share=share, pre_schedule=pre_schedule, servers=servers,
        )  # fmt: skip
        setups += [replace(setup, policy=name, options=_options_of(name, setup.options)) for name in names]
    _check_options(names, so.parse_options(option or []))
    if not setups:
        raise ShoalError("name at least one each of --costs, --knowledge and --placement")
    if report:
        from shoal.sim.inputs import check_not_read, check_writable

        check_writable(report)
        check_not_read(report, so.files_read(setups[0], option))
        if report.suffix not in (".html", ".htm") and report.parent != Path("/dev"):
            raise ShoalError(f"--report {report}: a report is a page; name it .html")
    results, not_begun, stopped = run_all(setups, workers, with_series=report is not None)
    if report and results:
        from shoal.sim.inputs import write_aside
        from shoal.sim.report.page import render

        page = render([r["series"] for r in results], not_begun)
        with write_aside(report) as aside:
            aside.write_text(page, encoding="utf-8")
        say(f"report: {report} ({len(page.encode()) / 1e6:.1f} MB)")
    summaries = [r["summary"] for r in results]
    if output == "json":
        print_json({"items": summaries, "next": None} | ({"not_begun": not_begun} if not_begun else {}))
    elif summaries:
        show(summaries)
    for s in summaries:
        if not s["interrupted"] and s["finished"] < s["jobs"]:
            say(f"{s['label']}: {counted(s['jobs'] - s['finished'], 'job')} never ran, for want of a share")
    if stopped:
        say(_closing_line(summaries, not_begun))
        raise typer.Exit(130)


compare.__doc__ = f"{compare.__doc__}\n\n{EXAMPLES}"


def _closing_line(summaries: list[dict[str, Any]], not_begun: list[str]) -> str:
    """What of an interrupted comparison is whole, what is not, and what is missing."""
    cut = sum(s["interrupted"] for s in summaries)
    line = f"interrupted: {len(summaries) - cut} of {len(summaries) + len(not_begun)} runs had ended"
    if cut:
        line += "; of the others this is what was known by then, not to be compared"
    if not_begun:
        line += f"; not begun: {', '.join(not_begun)}"
    return line


def _words(text: str) -> list[str]:
    """The words of a list, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _fields(policy: str) -> set[str]:
    import dataclasses

    from shoal.policies.registry import policy_class

    return {f.name for f in dataclasses.fields(policy_class(policy).Options)}


def _options_of(policy: str, options: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in options.items() if k in _fields(policy)}


def _check_options(policies: list[str], options: dict[str, str]) -> None:
    """An option that none of the policies has is a mistake."""
    from shoal.core.errors import ShoalError, did_you_mean

    if not policies:
        raise ShoalError("name at least one policy: --policies afs-l,afs-p")
    known = set().union(*(_fields(p) for p in policies))
    for name in options:
        if name not in known:
            raise ShoalError(f"none of these policies has an option {name!r}; {did_you_mean(name, known)}")


def run_all(setups: list[Any], workers: int | None, with_series: bool) -> tuple[list[Any], list[str], bool]:
    """Run all, in processes of their own: (results, labels of runs not begun, whether the user interrupted).

    After an interrupt the results hold what was known by then.
    """
    import multiprocessing
    import os
    import signal
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures import wait as wait_for
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing.managers import SyncManager

    from shoal.cli.out import say
    from shoal.cli.sim_progress import Watch
    from shoal.core.errors import RunLost
    from shoal.sim.runner import check_placement, load, remarks

    inputs = load(setups[0])  # every mistake in the files is found here, once
    for setup in setups:
        check_placement(setup, inputs.cluster)
    for line in dict.fromkeys(line for setup in setups for line in remarks(setup, inputs)):
        say(line)
    total = len(inputs.jobs)
    labels = label_all(setups)
    context = multiprocessing.get_context("spawn")
    stopped = False
    # Processes ignore Ctrl-C if they were started while this one did: here it is decided what it means.
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    manager = SyncManager(ctx=context)
    manager.start(_end_with_parent)
    with (
        manager,
        Watch(dict.fromkeys(labels, total)) as watch,
        ProcessPoolExecutor(workers or os.cpu_count(), context, _end_with_parent) as pool,
    ):
        queue, stop = manager.Queue(), manager.Event()
        futures = [
            pool.submit(_run_one, setup, label, queue, stop, with_series)
            for setup, label in zip(setups, labels)
        ]
        try:
            signal.signal(signal.SIGINT, heard)
            while wait_for(futures, timeout=0.2).not_done:
                _drain(queue, watch)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, lambda *_: _give_up(watch))
            say("interrupted: ending after the decisions at hand (Ctrl-C again: at once)")
            stopped = True
            stop.set()
            for future in futures:
                future.cancel()
        _drain(queue, watch)
        try:
            results = [None if f.cancelled() else f.result() for f in futures]
        except BrokenProcessPool:
            raise RunLost(
                "a process of this comparison was killed, maybe for want of memory; "
                "let fewer run at once (--workers 1), or run that policy alone (shoal sim run)"
            ) from None
    signal.signal(signal.SIGINT, heard)
    not_begun = [label for label, result in zip(labels, results) if result is None]
    return [result for result in results if result is not None], not_begun, stopped


def _end_with_parent() -> None:
    """A comparison that is killed leaves no process behind."""
    import multiprocessing
    import os
    import threading

    parent = multiprocessing.parent_process()

    def end() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _give_up(watch: Any) -> None:
    """End all processes, and this one without a word of what they would have said."""
    import multiprocessing
    import os

    from shoal.cli.out import say

    watch.close()
    for child in multiprocessing.active_children():
        child.kill()
    say("interrupted")
    os._exit(130)


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
        parts += [s.autoscale or "as wished"] if searches_differ else []
        labels.append(" / ".join(parts))
    return labels


def _drain(queue: Any, watch: Any) -> None:
    while not queue.empty():
        news = queue.get()
        if news is None:
            watch.first_use()
        else:
            watch.tell(*news)


def _run_one(setup: Any, label: str, queue: Any, stop: Any, with_series: bool) -> dict[str, Any] | None:
    """The figures of one run; None if the user interrupted before it began."""
    import time

    from shoal.sim.runner import run

    if stop.is_set():  # the pool hands out work ahead of time, and that cannot be cancelled any more
        return None
    told_s = 0.0

    def progress(now_s: float, done: int, total: int) -> bool:
        nonlocal told_s
        if time.monotonic() < told_s + _EVERY_S:
            return True
        told_s = time.monotonic()
        queue.put((label, now_s, done))
        return not stop.is_set()

    result = run(setup, progress, compiles=lambda: queue.put(None))
    queue.put((label, result.record.end_s, result.summary["finished"]))
    summary = {"label": label, **result.summary, "costs": setup.costs.kind, "seed": setup.seed}
    summary["knowledge"] = str(setup.knowledge)
    summary["placement"] = setup.placement
    out: dict[str, Any] = {"summary": summary}
    if with_series:
        from shoal.sim.report.series import series_of

        out["series"] = series_of(result, summary)
    return out


def show(summaries: list[dict[str, Any]]) -> None:
    """The ranking. Runs that were cut short come after it, with how far they came: they compare with none."""
    from shoal.cli.out import decimal, duration, table

    cut = [s for s in summaries if s["interrupted"]]
    ended = sorted(
        (s for s in summaries if not s["interrupted"]), key=lambda s: s["avg_jct_s"] or float("inf")
    )
    best = min((s["avg_jct_s"] for s in ended if s["avg_jct_s"]), default=None)
    paused = any(s["avg_paused_s"] for s in summaries)
    rows = []
    for s in ended + cut:
        whole = not s["interrupted"]
        ratio = f"{s['avg_jct_s'] / best:.2f}x" if whole and best and s["avg_jct_s"] else "-"
        reached = duration(s["makespan_s"])
        rows.append(
            [
                s["label"] if whole else f"{s['label']} (to {reached})",
                duration(s["avg_jct_s"]),
                ratio,
                duration(s["p50_jct_s"]),
                duration(s["p99_jct_s"]),
                duration(s["avg_queue_s"]),
                *([duration(s["avg_paused_s"])] if paused else []),
                reached if whole else "-",
                f"{100 * s['utilization']:.0f} %",
                decimal(s["share_changes_per_job"], 1),
                decimal(s["finish_time_fairness"]["max"], 1),
                duration(s["wall_s"]),
            ]
        )
    head = [
        "policy", "avg JCT", "vs best", "p50", "p99", "avg wait", *(["standstill"] if paused else []),
        "makespan", "GPUs used", "changes/job", "worst rho", "took",
    ]  # fmt: skip
    table(head, rows, right=range(1, len(head)))
