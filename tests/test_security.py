"""docs/security.md names a test behind every statement."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_security_page_names_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    missing = [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing


def test_every_row_of_the_security_page_has_a_test_or_says_what_remains() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("shown by |")]
    without = [row for row in rows if "tests/" not in row and "| the same |" not in row]
    assert all("(#what-remains)" in row or row.startswith("| the account that runs") for row in without), (
        without
    )
