"""`shoal exec` and `shoal run --interactive`, with real processes and a real terminal."""

import os
import pty
import select
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

from live_cluster import eventually


def test_a_command_runs_next_to_a_job_with_its_variables_and_directory(live, tmp_path):
    live.shoal("run", "-d", "--name", "e1", "-e", "LR=0.1", "--", "sleep", "600", code=0, cwd=tmp_path)
    live.shoal("wait", "e1", "--for", "running", "--timeout", "60s", code=0)
    script = 'echo "$SHOAL_JOB_NAME $LR $PWD"; echo oops >&2; exit 3'
    done = live.shoal("exec", "e1", "--", "sh", "-c", script, code=3)
    assert done.stdout == f"e1 0.1 {tmp_path}\noops\n"
    assert live.shoal("exec", "e1", "--", "no-such-program").returncode == 127
    missing = live.shoal("exec", "e1", "--rank", "7", "--", "true")
    assert missing.returncode == 3
    assert "has no running rank 7; it has 0" in missing.stderr
    # Input is passed on with a terminal only, and that is said.
    piped = live.shoal("exec", "e1", "--", "cat", stdin="lost\n", code=0)
    assert piped.stdout == ""
    assert "standard input was not passed on to the command; -t passes it on" in piped.stderr
    assert live.shoal("exec", "e1", "--", "true", code=0).stderr == ""
    assert "lost" in live.shoal("exec", "-t", "e1", "--", "cat", stdin="lost\n", code=0).stdout
    # A long output arrives whole, and what was started ends with its job.
    long = live.shoal("exec", "e1", "--", "sh", "-c", "seq 1 200000", code=0)
    assert long.stdout.split() == [str(n) for n in range(1, 200001)]
    live.shoal("cancel", "e1", "-y", "--grace", "0s", code=0)
    live.shoal("wait", "e1", "--timeout", "60s")
    over = live.shoal("exec", "e1", "--", "true")
    assert over.returncode == 5
    assert "is over" in over.stderr


def test_an_interactive_job_has_this_terminal_and_ends_with_it(live):
    ours, theirs = pty.openpty()
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    shoal = [sys.executable, "-m", "shoal.cli.main", "run", "--interactive", "--name", "i1", "--", "sh"]
    started = subprocess.Popen(
        shoal, stdin=theirs, stdout=theirs, stderr=theirs, env=live.env, start_new_session=True
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([ours], [], [], 60.0)[0], seen
            seen += os.read(ours, 65536)

    try:
        until(b"$ " if os.geteuid() else b"# ")
        os.write(ours, b"echo $((40+2)) on $SHOAL_GPUS; stty size\n")
        until(b"42 on 1\r\n33 101\r\n")
        os.write(ours, b"sleep 1000\n")
        until(b"sleep 1000\r\n")
        os.write(ours, b"\x03")  # Ctrl-C ends the command, not the shell
        os.write(ours, b"echo still $((1+1)) here; exit 7\n")
        until(b"still 2 here")
        assert started.wait(60) == 7
    finally:
        started.kill()
        os.close(ours)
    assert eventually(lambda: live.json("show", "i1")["state"] == "cancelled")
