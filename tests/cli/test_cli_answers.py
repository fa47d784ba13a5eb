"""Answers of commands about jobs that have changed: what is in force after `scale`, and a part of the log."""

import json
import sys
from datetime import datetime, timedelta

import pytest
from live_cluster import eventually

PRINTS = "import time\nprint('first', flush=True)\ntime.sleep(2)\nprint('second', flush=True)"


def test_show_tells_the_range_in_force_after_scale(live):
    live.shoal(
        "run", "-d", "--name", "scaled", "--gpus", "1..2", "--resize", "restart", "--", "sleep", "600", code=0
    )
    live.shoal("scale", "scaled", "--min", 2, "--max", 3, code=0)
    lines = live.shoal("show", "scaled", code=0).stdout.splitlines()
    begin = lines.index("Settings in force")
    settings = dict(line.split(None, 1) for line in lines[begin + 1 : lines.index("", begin)])
    assert settings["gpus"] == "2..3", "not what was submitted"
    assert not any("Submitted as" in line for line in lines)
    live.shoal("cancel", "scaled", "-y", "--grace", "0s", code=0)


@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [
        ("4..1", "min 4 is above max 1"),
        (
            "four",
            "'four' is not a number of GPUs: write 4, 1..8 for a range, or 2..8:2 for multiples of 2 in it, or auto",
        ),
    ],
)
def test_a_wrong_range_is_told_in_one_whole_sentence(live, gpus, sentence):
    done = live.shoal("run", "--gpus", gpus, "--", "true", code=7)
    assert done.stderr == f"shoal: command line: gpus: {sentence}\n"


def test_logs_since_a_time_leaves_out_what_was_before(live):
    live.shoal("run", "--name", "since", "--", sys.executable, "-c", PRINTS, code=0, timeout=120)
    lines = eventually(lambda: json.loads(live.shoal("logs", "since", "-o", "json", code=0).stdout)["items"])
    assert [line["text"] for line in lines] == ["first", "second"]
    first = datetime.fromisoformat(lines[0]["at"])
    second = datetime.fromisoformat(lines[1]["at"])
    between = (first + (second - first) / 2).isoformat()
    assert live.shoal("logs", "since", "--since", between, code=0).stdout == "second\n"
    assert live.shoal("logs", "since", "--since", "1h", code=0).stdout == "first\nsecond\n"
    later = (second + timedelta(hours=1)).isoformat()
    assert live.shoal("logs", "since", "--since", later, code=0).stdout == ""
