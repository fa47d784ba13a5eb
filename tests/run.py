"""Runs pytest on two processes, and what fails then once more by itself: `python tests/run.py ARGUMENTS`.

Hundreds of these tests start servers, workers and whole engines, which share two processors with each other and maybe
with other machines. A test that fails then may have met a limit in seconds that it keeps by itself. At most five get
this second run, and the output names each of them, so that a fault which comes and goes is seen. Tests that only
compute get none: what they find, no limit in seconds explains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
TESTS_FAILED = 1
ONLY_COMPUTE = (
    *(
        "tests/fair/",
        "tests/knowledge/",
        "tests/papers/",
        "tests/placement/",
        "tests/policies/",
        "tests/scheduler/",
    ),
    *("tests/server/test_crash.py", "tests/server/test_restart.py", "tests/wire/test_protocol.py"),
)
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], check=False).returncode


def main(arguments: list[str]) -> int:
    code = pytest("--cache-clear", "-n", "2", "--dist", "loadfile", *arguments)
    if code != TESTS_FAILED:
        return code
    failed = sorted(json.loads(LAST_FAILED.read_text()))
    if len(failed) > MOST or any(test.startswith(ONLY_COMPUTE) for test in failed):
        return code
    print(
        f"failed beside other tests, and now run by themselves ({len(failed)}):",
        *failed,
        sep="\n  ",
        flush=True,
    )
    code = pytest(*failed)
    if code == 0:
        print("passed by themselves, so look at them when you can:", *failed, sep="\n  ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
