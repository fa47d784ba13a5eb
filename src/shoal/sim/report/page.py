"""The HTML page of a report: the data of all runs in one self-contained file."""

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
from shoal.sim.report.packed_columns import pack_numbers, pack_words
from shoal.sim.report.time_buckets import Buckets, coarsen, fold
from shoal.sim.report.timelines import short

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = (
    "uPlot.iife.min.js",
    "format.js",
    "charts.js",
    "ranking.js",
    "users.js",
    "columns.js",
    "jobs.js",
    "main.js",
)

#: Columns of jobs that belong to the trace, and to a run; and their numeric types.
_OF_TRACE = {
    "name": "words",
    "user": "words",
    "model": "words",
    "requested": "u4",
    "submit_s": "f4",
    "work_gpu_s": "f4",
}
_OF_RUN = {
    "jct_s": "f4",
    "wait_s": "f4",
    "changes": "u4",
    "points": "u4",
    "at": "u4",
    "gpus": "u4",
    "guests": "u4",
}


def render(series: list[dict[str, Any]], not_begun: Sequence[str] = ()) -> str:
    """The page as HTML, which opens in any browser without a network. It names the runs that did not begin."""
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
    """The hash of the page's own script for its content security policy; no other script can run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_json(data: dict[str, Any]) -> Markup:
    """JSON for a script element, escaped so that it can neither end the element nor open a comment."""
    text = json.dumps(clean(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def clean(value: Any) -> Any:
    """Plain JSON values; nan and infinity become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def assemble(series: list[dict[str, Any]], not_begun: Sequence[str] = ()) -> dict[str, Any]:
    """The data of the page: the data of the trace once, and the data of each run."""
    if not series:
        raise ValueError("a report needs at least one run")
    width = max(s["over_time"]["width_s"] for s in series)
    watched = watched_by_policy(series)
    one = series[0]
    return {
        "meta": {
            "jobs": len(one["jobs"]["name"]),
            "runs": len(series),
            "policies": len({s["policy"] for s in series}),
            "seed": one["seed"],
            "not_begun": list(not_begun),
            **one["cluster"],
        },
        "width_s": width,
        "jobs": packed(one["jobs"], _OF_TRACE),
        "runs": [run_of(s, width, watched[s["policy"]]) for s in series],
    }


def watched_by_policy(series: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The jobs to show for all runs of a policy. Its runs differ in cost model, so they show the same jobs."""
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for s in series:
        runs.setdefault(s["policy"], []).append(s["watched"])
    return {policy: choose_watched(of_policy) for policy, of_policy in runs.items()}


def choose_watched(runs: list[list[dict[str, Any]]]) -> list[int]:
    """The candidates whose shares change most often over all runs: they show the cost of changes best.

    A job submitted at time zero comes first, as in CoDDL's experiment, unless the share of another job changes more
    than twice as often.
    """
    if not runs[0]:
        return []  # a trace without jobs
    changes = np.sum([[job["changes"] for job in run] for run in runs], axis=0)
    at_zero = np.flatnonzero([job["submit_s"] == 0 for job in runs[0]])
    first, most = int(at_zero[np.argmax(changes[at_zero])]), int(np.argmax(changes))
    return [most, first] if changes[most] > 2 * changes[first] else [first]


def packed(jobs: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """Columns of jobs in the page's encoding."""
    return {
        name: pack_words(jobs[name]) if kind == "words" else pack_numbers(jobs[name], kind)
        for name, kind in kinds.items()
    }


def run_of(s: dict[str, Any], width_s: float, watched: list[int]) -> dict[str, Any]:
    """The data of one run, in the common time buckets."""
    kept = ("label", "policy", "costs", "setup", "figures", "cdf", "users", "trades")
    return {
        **{name: s[name] for name in kept},
        "watched": [s["watched"][k] for k in watched],
        "over_time": on_grid(s["over_time"], width_s),
        "jobs": {**packed(s["jobs"], _OF_RUN), "unit_s": s["jobs"]["unit_s"]},
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
