"""Which size the autoscaler tries next, given the measurements so far. Pure functions without state.

The authors' rules (MLSys'20, as in their code) use the measured sizes in increasing order and the heuristic's
verdict on each pair of neighbours:

1. one size measured: one step up, or down if it is the largest allowed size;
2. no pair fails and the largest measured size is not the maximum: one step up from the largest;
3. the first three pairs do not all pass and the smallest measured size is not the minimum: one step down;
4. otherwise settle at the size before the first failing pair (at the largest if none fails),
5. but first go to the next larger size if fewer than 100 steps were recorded there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.core.errors import ShoalError
from shoal.core.words import counted
from shoal.knowledge.counts import MOST, is_count
from shoal.knowledge.heuristics import Heuristic, Point, Progress, Verdict
from shoal.knowledge.unknown import Unknown


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of the rules; the defaults are the authors'.

    `doubling`: double the size at each step up, then bisect the interval of the first failure; the last step
    up to the chosen size gets a verdict of its own.
    `confidence`: a verdict within this many standard errors of its limit is not used; measurement goes on,
    up to `sure_after_steps`. `hysteresis`: leave a settled size only if the margin exceeds this.
    """

    passes_before_settling: int = 3
    steps_at_next: int = 100
    doubling: bool = False
    confidence: float = 0.0
    sure_after_steps: int = 100
    hysteresis: float = 0.0


@dataclass(frozen=True, slots=True)
class Aim:
    gpus: int
    code: str
    why: str


def ladder(min_gpus: int, max_gpus: int, step_gpus: int, sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """The sizes that may be tried, in increasing order."""
    if not all(is_count(number, -MOST) for number in (min_gpus, max_gpus, step_gpus, *sizes)):
        raise ShoalError(f"sizes are whole numbers of GPUs, not {min_gpus} to {max_gpus} by {step_gpus}")
    wanted = sorted(set(sizes)) if sizes else range(min_gpus, max_gpus + 1, max(step_gpus, 1))
    return tuple(k for k in wanted if max(min_gpus, 1) <= k <= max_gpus)


def aim_for(
    points: Sequence[Point],
    now_gpus: int,
    sizes: tuple[int, ...],
    rules: Rules,
    heuristic: Heuristic,
    progress: Progress,
    settled: int | None = None,
) -> Aim:
    """The size to try next, or to stay at, given points in increasing order of size."""
    allowed = [point for point in points if sizes[0] <= point.gpus <= sizes[-1]]
    if now_gpus < sizes[0] or now_gpus > sizes[-1] or not allowed:
        nearest = min(max(now_gpus, sizes[0]), sizes[-1])
        return Aim(nearest, "Climb" if nearest > now_gpus else "Descend", "the size is outside its limits")
    if len(allowed) == 1:
        return _first_move(allowed[0], sizes, rules)
    verdicts: list[Verdict] = []
    for smaller, larger in pairwise(allowed):
        verdict = heuristic.judge(smaller, larger, progress)
        if isinstance(verdict, Unknown):
            return Aim(now_gpus, "Unknown", verdict.why)
        verdicts.append(_with_hysteresis(verdict, smaller, larger, settled, rules.hysteresis))
    unsure = _unsure(allowed, verdicts, now_gpus, rules)
    return unsure if unsure is not None else _move(allowed, verdicts, now_gpus, sizes, rules)


def _first_move(point: Point, sizes: tuple[int, ...], rules: Rules) -> Aim:
    up = _above(point.gpus, sizes, rules)
    if up is not None:
        return Aim(up, "Climb", f"only {counted(point.gpus, 'GPU')} measured so far")
    down = _below(point.gpus, sizes)
    if down is not None:
        return Aim(down, "Descend", f"only {counted(point.gpus, 'GPU')} measured so far")
    return Aim(point.gpus, "Settle", f"{counted(point.gpus, 'GPU')} is the only size allowed")


def _move(
    points: list[Point], verdicts: list[Verdict], now_gpus: int, sizes: tuple[int, ...], rules: Rules
) -> Aim:
    first_failure = next((i for i, verdict in enumerate(verdicts) if not verdict.passes), None)
    if first_failure is None:
        up = _above(points[-1].gpus, sizes, rules)
        if up is not None:
            return Aim(up, "Climb", verdicts[-1].why)
    bottom = verdicts[: rules.passes_before_settling]
    down = _below(points[0].gpus, sizes)
    if down is not None and not all(verdict.passes for verdict in bottom):
        return Aim(down, "Descend", verdicts[0].why)
    best = points[-1 if first_failure is None else first_failure]
    why = f"every step up to {counted(best.gpus, 'GPU')}, the most allowed, pays"
    if first_failure is not None:
        refused, why = points[first_failure + 1], verdicts[first_failure].why
        between = sizes[bisect_right(sizes, best.gpus) : bisect_left(sizes, refused.gpus)]
        if rules.doubling and between:
            middle = between[len(between) // 2]
            return _toward(middle, now_gpus, f"the limit lies below {refused.gpus} GPUs: {why}")
    skipped = _skipped_below(best.gpus, points, sizes) if rules.doubling else None
    if skipped is not None:
        return _toward(skipped, now_gpus, f"the last step up to {best.gpus} GPUs was not judged alone yet")
    if first_failure is not None and refused.steps < rules.steps_at_next:
        return Aim(refused.gpus, "Gather", f"{refused.gpus} GPUs has only {refused.steps} steps recorded")
    return Aim(best.gpus, "Settle", why)


def _toward(gpus: int, now_gpus: int, why: str) -> Aim:
    return Aim(gpus, "Climb" if gpus > now_gpus else "Descend", why)


def _unsure(points: list[Point], verdicts: list[Verdict], now_gpus: int, rules: Rules) -> Aim | None:
    """Continue to measure while a verdict about the present size is within the noise."""
    if rules.confidence <= 0:
        return None
    for smaller, larger, verdict in zip(points, points[1:], verdicts):
        here = smaller if smaller.gpus == now_gpus else larger if larger.gpus == now_gpus else None
        if here is None or here.steps >= rules.sure_after_steps:
            continue
        if abs(verdict.margin) < rules.confidence * verdict.std_error:
            return Aim(now_gpus, "Measuring", f"{verdict.why}; within noise after {here.steps} steps")
    return None


def _with_hysteresis(
    verdict: Verdict, smaller: Point, larger: Point, settled: int | None, hysteresis: float
) -> Verdict:
    """Shift the verdicts so that the settled size is left only for a clear gain, in either direction."""
    if settled is None or hysteresis <= 0:
        return verdict
    shift = hysteresis if larger.gpus <= settled else -hysteresis if smaller.gpus >= settled else 0.0
    return Verdict(verdict.margin + shift, verdict.std_error, verdict.why)


def _above(gpus: int, sizes: tuple[int, ...], rules: Rules) -> int | None:
    larger = sizes[bisect_right(sizes, gpus) :]
    if not larger:
        return None
    if not rules.doubling:
        return larger[0]
    return next((k for k in reversed(larger) if k <= 2 * gpus), larger[0])


def _skipped_below(gpus: int, points: list[Point], sizes: tuple[int, ...]) -> int | None:
    """The next smaller size, if doubling skipped it: not measured, but above the smallest measured size."""
    below = _below(gpus, sizes)
    measured = [point.gpus for point in points]
    return below if below is not None and below not in measured and measured[0] < below else None


def _below(gpus: int, sizes: tuple[int, ...]) -> int | None:
    smaller = sizes[: bisect_left(sizes, gpus)]
    return smaller[-1] if smaller else None
