"""The stories here drive the command line as the end-to-end tests do, with their helpers."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]
