"""Runs a keeper (`keeper.py`) as a process: `python -I -S run_keeper.py DIRECTORY LOCK_FD < specification`.

Python keeps the compiled form of a module, but not of the file that it runs. Every worker has a keeper, so it counts.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # it runs without packages

from keeper import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
