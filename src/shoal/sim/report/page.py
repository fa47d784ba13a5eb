"""The page of a report: the series of all runs brought together, and one HTML file without outside parts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shoal import __version__
from shoal.sim.report.grid import Buckets, coarsen, fold
from shoal.sim.report.timelines import short

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = ("uPlot.iife.min.js", "format.js", "charts.js", "ranking.js", "users.js", "jobs.js", "main.js")

#: The timelines of jobs take about this much of the page at most.
TIMELINE_BYTES = 1_300_000

_PER_JOB = ("jct_s", "wait_s", "changes", "at", "gpus")
_OF_TRACE = ("index", "name", "user", "model", "requested", "submit_s", "work_gpu_s")


def render(series: list[dict[str, Any]], not_begun: Sequence[str] = ()) -> str:
    """The page as text: open it in any browser, offline. It names the runs that were to be and did not begin."""
    data = assemble(series, not_begun)
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES)
    env = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    return env.get_template("template.html").render(
        data=as_json(data),
        script=Markup(script),
        script_hash=script_hash(f"\n{script}\n"),
        style=Markup(style),
        meta=data["meta"],
        version=__version__,
    )


def script_hash(text: str) -> str:
    """What the page's content security policy knows its own script by; no other script can run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_json(data: dict[str, Any]) -> Markup:
    """JSON that can stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(clean(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def clean(value: Any) -> Any:
    """Plain JSON values; what is no number becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def assemble(series: list[dict[str, Any]], not_begun: Sequence[str] = ()) -> dict[str, Any]:
    """The data of the page: what belongs to the trace once, what belongs to a run per run."""
    if not series:
        raise ValueError("a report needs at least one run")
    width = max(s["over_time"]["width_s"] for s in series)
    chosen = choose_jobs(series)
    watched = watched_by_policy(series)
    one = series[0]
    return {
        "meta": {
            "jobs": one["jobs"]["total"],
            "shown_jobs": len(chosen),
            "runs": len(series),
            "policies": len({s["policy"] for s in series}),
            "seed": one["seed"],
            "not_begun": list(not_begun),
            **one["cluster"],
        },
        "width_s": width,
        "jobs": {name: [one["jobs"][name][k] for k in chosen] for name in _OF_TRACE},
        "runs": [run_of(s, width, chosen, watched[s["policy"]]) for s in series],
    }


def watched_by_policy(series: list[dict[str, Any]]) -> dict[str, int]:
    """Which candidate to watch in all runs of a policy: they differ in what changes cost, and are compared."""
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for s in series:
        runs.setdefault(s["policy"], []).append(s["watched"])
    return {policy: choose_watched(of_policy) for policy, of_policy in runs.items()}


def choose_watched(runs: list[list[dict[str, Any]]]) -> int:
    """The candidate whose share changes most often over all runs: there is most to see of what that costs.

    It is one submitted at time zero, as in CoDDL's experiment, unless another's changes more than twice as often.
    """
    if not runs[0]:
        return 0  # a trace without jobs has none to watch
    changes = np.sum([[job["changes"] for job in run] for run in runs], axis=0)
    at_zero = np.flatnonzero([job["submit_s"] == 0 for job in runs[0]])
    first, most = at_zero[np.argmax(changes[at_zero])], np.argmax(changes)
    return int(most if changes[most] > 2 * changes[first] else first)


def run_of(s: dict[str, Any], width_s: float, chosen: list[int], watched: int) -> dict[str, Any]:
    """One run, on the common grid of time and with the chosen jobs."""
    kept = ("label", "policy", "costs", "figures", "cdf", "users", "trades")
    return {
        **{name: s[name] for name in kept},
        "watched": s["watched"][watched] if s["watched"] else None,
        "over_time": on_grid(s["over_time"], width_s),
        "jobs": {name: [s["jobs"][name][k] for k in chosen] for name in _PER_JOB},
    }


def on_grid(over_time: dict[str, Any], width_s: float) -> dict[str, Any]:
    """A run's series over time in buckets of `width_s`."""
    factor = round(width_s / over_time["width_s"])
    out: dict[str, Any] = {
        "end_s": over_time["end_s"],
        "changes": fold(over_time["changes"], factor).tolist(),
    }
    for name in ("used", "waiting"):
        packed = {key: np.array(values) for key, values in over_time[name].items()}
        wide = coarsen(Buckets(over_time["width_s"], over_time["end_s"], **packed), width_s)
        out[name] = {"mean": short(wide.mean, 2), "low": short(wide.low, 2), "high": short(wide.high, 2)}
    return out


def choose_jobs(series: list[dict[str, Any]], most_bytes: int = TIMELINE_BYTES) -> list[int]:
    """Positions of the jobs to show: all, or as many as fit.

    In turn the longest job, the one whose share changed most often in any run, and one from all over the
    trace, until the page is full. Every run shows the same jobs.
    """
    jobs = [s["jobs"] for s in series]
    n = len(jobs[0]["index"])
    cost = [sum(14 + 6 * len(j["at"][k]) for j in jobs) + 60 for k in range(n)]
    if sum(cost) <= most_bytes:
        return list(range(n))
    changes = np.max([j["changes"] for j in jobs], axis=0)
    anywhere = np.random.default_rng(n).permutation(n)
    longest = np.argsort(-np.array(jobs[0]["work_gpu_s"]), kind="stable")
    turns = (longest, np.argsort(-changes, kind="stable"), anywhere)
    chosen: set[int] = set()
    left = most_bytes
    for candidates in zip(*turns):
        for k in map(int, candidates):
            if k not in chosen:
                left -= cost[k]
                if left < 0:
                    return sorted(chosen)
                chosen.add(k)
    return sorted(chosen)
