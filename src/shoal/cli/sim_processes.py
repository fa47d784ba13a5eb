"""The runs of a comparison, each in its own process, and their outcomes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext
from multiprocessing.managers import SyncManager
from traceback import extract_tb
from types import FrameType
from typing import Any

from shoal.cli.out import say
from shoal.cli.sim_progress import Watch
from shoal.core.errors import RunLost, ShoalError
from shoal.sim.interrupts import handled_by, held, stop

#: Interval at which a run reports its progress and checks whether to stop; each report is a message to another process.
_REPORT_S = 0.1


@dataclass(frozen=True)
class Failed:
    """Why a run has no figures. Plain data, because not every exception can be pickled."""

    message: str
    exit_code: int

    @classmethod
    def by(cls, error: Exception) -> Failed:
        if isinstance(error, ShoalError):
            return cls(str(error), getattr(error, "exit_code", 2))
        last = extract_tb(error.__traceback__)[-1]
        return cls(f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}", 1)


class RunsFailed(ShoalError):
    """Some runs of a comparison failed. The figures of the others are printed first."""

    def __init__(self, failed: Sequence[tuple[str, Failed]]) -> None:
        by_message: dict[str, list[str]] = {}
        for label, why in failed:
            by_message.setdefault(why.message, []).append(label)
        super().__init__("; ".join(f"{', '.join(who)} failed: {text}" for text, who in by_message.items()))
        self.exit_code = min(why.exit_code for _, why in failed)


@dataclass
class Outcome:
    """The outcome of every run, each in one of the lists. After an interrupt, results cover the simulated part."""

    results: list[dict[str, Any]] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    failed: list[tuple[str, Failed]] = field(default_factory=list)
    interrupted: bool = False


class _SignalHandler:
    """The first signal stops a comparison in order; the second one kills its processes."""

    asked = False

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        stop.note(signal_number)
        if self.asked:
            _kill_all()
        self.asked = True
        raise KeyboardInterrupt


def run_all(
    setups: Sequence[Any], labels: Sequence[str], jobs: int, workers: int | None, **how: Any
) -> Outcome:
    """Run all setups over a trace of `jobs` jobs, and show their progress."""
    context = multiprocessing.get_context("spawn")
    made = Outcome()
    # Processes that start while signals are held inherit the mask: only this process handles signals.
    with (
        handled_by(_SignalHandler()),
        held() as release,
        _manager(context) as manager,
        Watch(dict.fromkeys(labels, jobs)) as watch,
        ProcessPoolExecutor(workers or os.cpu_count(), context, _end_with_parent) as pool,
    ):
        queue, ends = manager.Queue(), manager.Event()
        futures = [pool.submit(_run_one, *one, queue, ends, **how) for one in zip(setups, labels)]
        try:
            release()
            while wait_for(futures, timeout=0.2).not_done:
                _drain(queue, watch)
        except KeyboardInterrupt:
            say("interrupted: stopping after the current decisions (Ctrl-C again: at once)")
            made.interrupted = True
            ends.set()
            for future in futures:
                future.cancel()
        _drain(queue, watch)
        for label, future in zip(labels, futures):
            _collect(made, label, future)
    return made


def _collect(made: Outcome, label: str, future: Future[dict[str, Any] | Failed | None]) -> None:
    """Wait for a run and add it to its list."""
    try:
        ended = None if future.cancelled() else future.result()
    except BrokenProcessPool:
        _kill_all()  # the pool asks the others to end by a signal, which they block
        why = RunLost(
            "a process of this comparison was killed, perhaps because memory ran out; "
            "run fewer at once (--workers 1), or run that policy alone (shoal sim run)"
        )
        ended = Failed.by(why)
    if ended is None:
        made.not_begun.append(label)
    elif isinstance(ended, Failed):
        made.failed.append((label, ended))
    else:
        made.results.append(ended)


@contextmanager
def _manager(context: SpawnContext) -> Iterator[SyncManager]:
    manager = SyncManager(ctx=context)
    manager.start(_end_with_parent)
    with manager:
        yield manager


def _end_with_parent() -> None:
    """End this process when its parent ends: a killed comparison leaves no process behind."""
    import threading

    parent = multiprocessing.parent_process()

    def end() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _kill_all() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def _drain(queue: Any, watch: Watch) -> None:
    while not queue.empty():
        report = queue.get()
        if report is None:
            watch.first_use()
        else:
            watch.show(*report)


def _run_one(setup: Any, label: str, queue: Any, ends: Any, **how: Any) -> dict[str, Any] | Failed | None:
    """The figures of one run, or why there are none; None if the comparison was interrupted before the run began."""
    if ends.is_set():  # the pool queues work ahead, which can no longer be cancelled
        return None
    try:
        return _figures(setup, label, queue, ends, **how)
    except Exception as error:
        return Failed.by(error)


def _figures(setup: Any, label: str, queue: Any, ends: Any, with_series: bool) -> dict[str, Any]:
    from shoal.sim.runner import run

    reported_s = 0.0

    def progress(now_s: float, done: int, total: int) -> bool:
        nonlocal reported_s
        if time.monotonic() < reported_s + _REPORT_S:
            return True
        reported_s = time.monotonic()
        queue.put((label, now_s, done))
        return not ends.is_set()

    result = run(setup, progress, compiles=lambda: queue.put(None))
    queue.put((label, result.record.end_s, result.summary["finished"]))
    summary = {"label": label, **result.summary, "costs": setup.costs.kind, "seed": setup.seed}
    summary["knowledge"] = str(setup.knowledge)
    summary["placement"] = setup.placement
    out: dict[str, Any] = {"summary": summary}
    if with_series:
        from shoal.sim.report.run_series import series_of

        # The series of an interrupted run end where it was interrupted.
        out["series"] = series_of(result, summary | {"makespan_s": summary["simulated_s"]})
    return out
