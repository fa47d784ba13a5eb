"""Tables of the fairness ledger and of the trades of `shoal sim run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Maximum rows of a table; JSON has all.
MOST_ROWS = 24
_COLUMNS = ("entitled", "traded", "received", "borrowed", "lent")


def ledger_rows(ledger: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row per user and GPU type, in GPU-hours. The user's deviation over all types is in its first row."""
    rows = []
    for user, account in ledger.items():
        types = [t for t in account if t != "deviation"]
        used = [t for t in types if any(abs(account[t][c]) >= 1.0 for c in _COLUMNS)]
        off = account["deviation"]
        for k, gpu_type in enumerate(used):
            hours = [_hours(account[gpu_type][c], signed=c == "traded") for c in _COLUMNS]
            rows.append(
                [
                    "" if k else user,
                    gpu_type,
                    *hours,
                    "" if k or off is None else _percent(off),
                ]
            )
    return rows


def trade_rows(rounds: list[Mapping[str, Any]], end_s: float) -> list[list[str]]:
    """A row per buyer, seller and pair of types, over all rounds: GPU-hours exchanged, prices, gains."""
    sums: dict[tuple[str, str, str, str], list[float]] = {}
    for r in rounds:
        until_s = end_s if r["until_s"] is None else r["until_s"]
        hours = max(until_s - r["time_s"], 0.0) / 3600
        for t in r["trades"]:
            key = (t["buyer"], t["seller"], t["fast"], t["slow"])
            found = sums.setdefault(key, [0.0, 0.0, 0.0, 0.0, t["price"], t["price"]])
            for k, name in enumerate(("fast_gpus", "slow_gpus", "buyer_gain", "seller_gain")):
                found[k] += t[name] * hours
            found[4], found[5] = min(found[4], t["price"]), max(found[5], t["price"])
    most_first = sorted(sums.items(), key=lambda item: (-item[1][2] - item[1][3], item[0]))
    return [
        [
            buyer,
            f"{fast_h:.1f} {fast}",
            seller,
            f"{slow_h:.1f} {slow}",
            f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} .. {high:.2f}",
            f"{buyer_gain:+.1f}",
            f"{seller_gain:+.1f}",
        ]
        for (buyer, seller, fast, slow), (fast_h, slow_h, buyer_gain, seller_gain, low, high) in most_first
        if fast_h >= 0.05
    ]


def show_fairness(summary: Mapping[str, Any]) -> None:
    """Print what users were entitled to, traded and received, and the trades; nothing for a single user."""
    from shoal.cli.out import say, table

    rows = ledger_rows(summary.get("ledger", {}))
    if rows:
        print()
        head = ["GPU-hours", "type", *_COLUMNS, "off its due"]
        table(head, rows[:MOST_ROWS], right=range(2, len(head)))
        if len(rows) > MOST_ROWS:
            say(f"{len(rows) - MOST_ROWS} more rows; -o json has all")
    trades = trade_rows(summary.get("trades", []), summary["simulated_s"])
    if trades:
        print()
        head = ["buyer", "got GPU-h", "from", "for GPU-h", "price", "buyer gains", "seller gains"]
        table(head, trades[:MOST_ROWS], right=(1, 3, 5, 6))
        say("gains are in GPU-hours of the type that the user gave, by the user's own speed-up")


def _percent(part: float) -> str:
    """A signed percentage; zero has no sign."""
    rounded = round(100 * part, 1)
    return f"{rounded:+.1f} %" if rounded else "0.0 %"


def _hours(gpu_s: float, *, signed: bool) -> str:
    hours = round(gpu_s / 3600, 1) + 0.0  # + 0.0 removes the sign of a zero
    return f"{hours:+,.1f}" if signed and hours else f"{hours:,.1f}"
