"""The table of a comparison."""

from __future__ import annotations

from typing import Any

#: Columns that a narrow terminal omits, in this order.
SPARE = (
    "took", "p50", "vs best", "worst rho", "changes/job", "GPUs used", "p99", "avg wait", "makespan", "standstill",
)  # fmt: skip


def show(summaries: list[dict[str, Any]]) -> None:
    """Print the ranking. Interrupted runs follow, with the time they reached: they cannot be compared."""
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
        rows.append(
            [
                s["label"] if whole else f"{s['label']} (to {duration(s['simulated_s'])})",
                duration(s["avg_jct_s"]),
                ratio,
                duration(s["p50_jct_s"]),
                duration(s["p99_jct_s"]),
                duration(s["avg_queue_s"]),
                *([duration(s["avg_paused_s"])] if paused else []),
                duration(s["makespan_s"]),
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
    table(head, rows, right=range(1, len(head)), spare=SPARE)
