"""Runs a keeper (`keeper.py`) as a process: `python -I -S run_keeper.py DIRECTORY LOCK_FD < specification`.

Python caches the bytecode of imported modules, but not of the script that it runs. Each worker starts a keeper, so this
saves time.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # it runs without packages

from keeper import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
