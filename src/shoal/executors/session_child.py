"""Becomes a command next to a worker: in its control group, account, directory and environment. Standard library only.

    python -I -S session_child.py SPEC_FD TTY

The specification (JSON) is that of the worker's keeper with another `command`. With TTY 1, standard input is a terminal
and becomes the controlling one, so that Ctrl-C reaches the command.
"""

import fcntl
import json
import os
import sys
import termios


def main() -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # it runs without packages
    import keeper  # type: ignore[import-not-found]

    with os.fdopen(int(sys.argv[1]), "rb") as file:
        spec = json.load(file)
    if sys.argv[2] == "1":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    try:
        os.chdir(spec["workdir"])
        keeper.confine(spec)
        os.execvpe(spec["command"][0], spec["command"], spec["env"])
    except OSError as error:
        print(f"shoal: cannot start {spec['command'][0]!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
