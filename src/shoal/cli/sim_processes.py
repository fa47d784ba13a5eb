"""The runs of a comparison, each in a process of its own, and what became of them."""

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

#: How often a run tells how far it is, and hears whether to go on: each time is a message to another process.
_EVERY_S = 0.1


@dataclass(frozen=True)
class Failed:
    """Why there are no figures of a run: plain data, as errors of others may not get from process to process."""

    message: str
    exit_code: int

    @classmethod
    def by(cls, error: Exception) -> Failed:
        if isinstance(error, ShoalError):
            return cls(str(error), getattr(error, "exit_code", 2))
        last = extract_tb(error.__traceback__)[-1]
        return cls(f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}", 1)


class RunsFailed(ShoalError):
    """Some runs of a comparison have no figures. The others have, and are told first."""

    def __init__(self, failed: Sequence[tuple[str, Failed]]) -> None:
        by_message: dict[str, list[str]] = {}
        for label, why in failed:
            by_message.setdefault(why.message, []).append(label)
        super().__init__("; ".join(f"{', '.join(who)} failed: {text}" for text, who in by_message.items()))
        self.exit_code = min(why.exit_code for _, why in failed)


@dataclass
class Outcome:
    """What became of the runs; each is in one of the lists. After an interrupt results are of what was known."""

    results: list[dict[str, Any]] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    failed: list[tuple[str, Failed]] = field(default_factory=list)
    interrupted: bool = False


class _Breaking:
    """The first signal ends a comparison well, the next one ends its processes and it at once."""

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
    """Run all setups, over a trace of so many jobs, and tell how far they are."""
    context = multiprocessing.get_context("spawn")
    made = Outcome()
    # Processes never hear of signals if they are started while these are held: here it is decided what they mean.
    with (
        handled_by(_Breaking()),
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
            say("interrupted: ending after the decisions at hand (Ctrl-C again: at once)")
            made.interrupted = True
            ends.set()
            for future in futures:
                future.cancel()
        _drain(queue, watch)
        for label, future in zip(labels, futures):
            _sort_in(made, label, future)
    return made


def _sort_in(made: Outcome, label: str, future: Future[dict[str, Any] | Failed | None]) -> None:
    """What became of one run; wait for it if it has not ended."""
    try:
        ended = None if future.cancelled() else future.result()
    except BrokenProcessPool:
        _kill_all()  # the pool asks the others to end, and they do not hear it
        why = RunLost(
            "a process of this comparison was killed, maybe for want of memory; "
            "let fewer run at once (--workers 1), or run that policy alone (shoal sim run)"
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
    """A comparison that is killed leaves no process behind."""
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
        news = queue.get()
        if news is None:
            watch.first_use()
        else:
            watch.tell(*news)


def _run_one(setup: Any, label: str, queue: Any, ends: Any, **how: Any) -> dict[str, Any] | Failed | None:
    """The figures of one run, or why there are none; None if the user interrupted before it began."""
    if ends.is_set():  # the pool hands out work ahead of time, and that cannot be cancelled any more
        return None
    try:
        return _figures(setup, label, queue, ends, **how)
    except Exception as error:
        return Failed.by(error)


def _figures(setup: Any, label: str, queue: Any, ends: Any, with_series: bool) -> dict[str, Any]:
    from shoal.sim.runner import run

    told_s = 0.0

    def progress(now_s: float, done: int, total: int) -> bool:
        nonlocal told_s
        if time.monotonic() < told_s + _EVERY_S:
            return True
        told_s = time.monotonic()
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

        # A report tells of a run that was cut short to where it came.
        out["series"] = series_of(result, summary | {"makespan_s": summary["simulated_s"]})
    return out
