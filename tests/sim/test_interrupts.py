"""Ctrl-C in a simulation: the results so far are kept, whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.core.cluster import Cluster
from shoal.policies.registry import policy_class
from shoal.sim.engine import Simulation
from shoal.sim.interrupts import SIGNALS, Stop, heeded, stoppable

from .small import PROFILES, job


def _raised_by_a_kernel():
    """What a compiled kernel turns `KeyboardInterrupt` into."""
    error = SystemError("CPUDispatcher(...) returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


TRACE = [job("a", 0.0, 10.0, 4), job("b", 20.0, 10.0, 4), job("c", 40.0, 10.0, 4)]


class Interrupted(policy_class("fifo")):
    """Ctrl-C, this many times, during the decision at the arrival of b."""

    times = 1

    def shares(self, view, gpus, now_s):
        if now_s == 20.0:
            for _ in range(self.times):
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:
                    raise _raised_by_a_kernel()  # noqa: B904 - it has a cause
            self.decided = True
        return super().shares(view, gpus, now_s)


@pytest.fixture(autouse=True)
def as_at_the_start_of_a_process(monkeypatch):
    monkeypatch.setattr("shoal.sim.interrupts.stop", Stop())
    usual = dict.fromkeys(SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(policy):
    with heeded() as interrupt:
        return Simulation(TRACE, PROFILES, Cluster.pool(4), policy).run(interrupt=interrupt)


def test_a_decision_is_completed_and_is_the_last_one():
    policy = Interrupted()
    record = run(policy)
    assert policy.decided
    assert record.interrupted
    assert record.change_job == [0, 0, 1], "b has started"
    assert np.isfinite(record.finish_s).tolist() == [True, False, False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_does_not_wait_for_the_decision_and_the_results_so_far_are_kept():
    policy = Interrupted()
    policy.times = 2
    record = run(policy)
    assert not hasattr(policy, "decided")
    assert record.interrupted
    assert record.change_job == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_handler_a_simulation_raises_like_any_program():
    with pytest.raises(SystemError):  # from the kernel; the command line reports it as Ctrl-C
        Simulation(TRACE, PROFILES, Cluster.pool(4), Interrupted()).run()


def test_an_interrupted_experiment_of_a_paper_has_no_result(monkeypatch, capsys):
    monkeypatch.setattr(Simulation, "run", lambda self, *_, interrupt: interrupted_at_once(self, interrupt))
    with pytest.raises(SystemExit) as end:
        main(["sim", "paper", "afs", "--quick"])
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "shoal: interrupted\n")


def interrupted_at_once(simulation, interrupt):
    interrupt.asked = True
    return UNPATCHED(simulation, interrupt=interrupt)


UNPATCHED = Simulation.run


@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_a_signal_before_or_after_a_simulation_ends_the_command_with_the_exit_code_of_the_signal(
    how, code, monkeypatch, capsys
):
    monkeypatch.setattr("shoal.sim.papers.optimus.run", lambda **_: signal.raise_signal(how))
    with pytest.raises(SystemExit) as end:
        main(["sim", "paper", "optimus"])
    assert end.value.code == code
    assert capsys.readouterr() == ("", "shoal: interrupted\n")
    assert signal.getsignal(how) is signal.SIG_IGN, "no further signal interrupts the exit"


def test_ignored_signals_stay_ignored_and_a_command_that_ends_restores_all_handlers():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stoppable():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_a_command_sigterm_is_not_handled():
    with heeded():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


ASKED = """
import os, signal, sys, threading, time
from shoal.cli.main import main
from shoal.sim.engine import Simulation

def ask(times):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)

def run(self, *_, interrupt):
    threading.Thread(target=ask, args=(int(sys.argv[1]),), daemon=True).start()
    return unpatched(self, lambda *_: time.sleep(0.1) or True, every=1, interrupt=interrupt)

unpatched, Simulation.run = Simulation.run, run
main(["sim", "run", "--sample", "--policy", "fifo"])
"""


@pytest.mark.parametrize("times", [1, 2, 3, 1000])
def test_a_run_ends_with_130_after_any_number_of_signals(times):
    ran = subprocess.run([sys.executable, "-c", ASKED, str(times)], capture_output=True, text=True)
    assert ran.returncode == 130
    assert "Traceback" not in ran.stderr


def test_a_system_error_with_another_cause_is_not_an_interrupt():
    class Broken(policy_class("fifo")):
        def shares(self, view, gpus, now_s):
            raise SystemError("broken")

    with pytest.raises(SystemError, match="broken"):
        run(Broken())


def test_a_handler_of_the_caller_stays_in_force():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append("heard"))
    record = run(Interrupted())
    assert heard == ["heard"]
    assert np.isfinite(record.finish_s).all()


def test_a_simulation_in_a_thread_leaves_signals_alone():
    records = []
    thread = threading.Thread(target=lambda: records.append(run(policy_class("fifo")())))
    thread.start()
    thread.join()
    assert np.isfinite(records[0].finish_s).all()


CTRL_C = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
CTRL_C_IN_A_CLASS = """
import signal

class Field:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Owner:
    field = Field()
"""


@pytest.mark.parametrize(
    ("module", "text"),
    [("click", CTRL_C), ("click", CTRL_C_IN_A_CLASS), ("numpy", CTRL_C), ("numpy", CTRL_C_IN_A_CLASS)],
    ids=["as it starts", "as it starts, in a class", "as a command is loaded", "the same, in a class"],
)
@pytest.mark.parametrize("program", ["shoal", "python -m shoal.cli.main"])
def test_ctrl_c_while_the_program_is_loaded_prints_one_line(tmp_path, program, module, text):
    (tmp_path / f"{module}.py").write_text(text)
    script = Path(sys.executable).with_name("shoal")
    if program == "shoal" and not script.exists():
        pytest.skip("shoal is not installed beside this Python")
    begin = [script] if program == "shoal" else [sys.executable, "-m", "shoal.cli.main"]
    ran = subprocess.run(
        [*begin, "sim", "run", "--sample", "--policy", "fifo"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "shoal: interrupted\n")


def test_ctrl_c_during_shell_completion_prints_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setenv("_SHOAL_COMPLETE", "bash_complete")
    monkeypatch.setattr("click.shell_completion.shell_complete", interrupted)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "shoal: interrupted\n")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, _raised_by_a_kernel])
def test_ctrl_c_before_a_run_begins_prints_one_line(raised, monkeypatch, capsys):
    def load(setup):
        raise raised()

    monkeypatch.setattr("shoal.sim.runner.load", load)
    with pytest.raises(SystemExit) as end:
        main(["sim", "run", "--sample"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "shoal: interrupted\n"
