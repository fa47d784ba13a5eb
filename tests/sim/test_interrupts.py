"""Ctrl-C in a simulation: what is known so far is kept, wherever it comes."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.core.cluster import Cluster
from shoal.policies.registry import policy_class
from shoal.sim.engine import Simulation
from shoal.sim.interrupts import heeded

from .small import PROFILES, job


def _as_a_kernel_has_it():
    """What a compiled kernel makes of Ctrl-C."""
    error = SystemError("CPUDispatcher(...) returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


TRACE = [job("a", 0.0, 10.0, 4), job("b", 20.0, 10.0, 4), job("c", 40.0, 10.0, 4)]


class Interrupted(policy_class("fifo")):
    """Ctrl-C while b is decided upon, so many times."""

    times = 1

    def shares(self, view, gpus, now_s):
        if now_s == 20.0:
            for _ in range(self.times):
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:
                    raise _as_a_kernel_has_it()  # noqa: B904 - it has a cause
            self.decided = True
        return super().shares(view, gpus, now_s)


@pytest.fixture(autouse=True)
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(policy):
    with heeded() as interrupt:
        return Simulation(TRACE, PROFILES, Cluster.pool(4), policy).run(interrupt=interrupt)


def test_a_decision_is_not_broken_off_and_is_the_last_one():
    policy = Interrupted()
    record = run(policy)
    assert policy.decided
    assert record.interrupted
    assert record.change_job == [0, 0, 1], "b has started"
    assert np.isfinite(record.finish_s).tolist() == [True, False, False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_asks_twice_does_not_wait_for_the_decision_and_still_has_what_is_known():
    policy = Interrupted()
    policy.times = 2
    record = run(policy)
    assert not hasattr(policy, "decided")
    assert record.interrupted
    assert record.change_job == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_simulation_whose_caller_does_not_ask_is_broken_off_as_any_program():
    with pytest.raises(SystemError):  # as the kernel has it, which the command line takes for Ctrl-C
        Simulation(TRACE, PROFILES, Cluster.pool(4), Interrupted()).run()


@pytest.mark.parametrize(
    ("modules", "at_once"),
    [
        ((), False),
        (("numba.core.compiler_machinery",), True),
        (("numba.core.compiler_machinery", "numba.core.caching"), False),
    ],
)
def test_compiling_is_broken_off_but_not_while_what_was_compiled_is_written(modules, at_once):
    def interrupt_it():
        signal.raise_signal(signal.SIGINT)

    def within(module, call):
        space = {"__name__": module, "call": call}
        exec("def step():\n call()", space)
        return space["step"]

    for module in reversed(modules):
        interrupt_it = within(module, interrupt_it)

    class Compiled(policy_class("fifo")):
        def shares(self, view, gpus, now_s):
            if now_s == 20.0:
                interrupt_it()
                self.decided = True
            return super().shares(view, gpus, now_s)

    policy = Compiled()
    record = run(policy)
    assert record.interrupted
    assert hasattr(policy, "decided") != at_once


def test_half_of_a_papers_experiment_is_no_result(monkeypatch, capsys):
    monkeypatch.setattr(Simulation, "run", lambda self, *_, interrupt: interrupted_at_once(self, interrupt))
    with pytest.raises(SystemExit) as end:
        main(["sim", "paper", "afs", "--quick"])
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "shoal: interrupted\n")


def interrupted_at_once(simulation, interrupt):
    interrupt.asked = True
    return UNPATCHED(simulation, interrupt=interrupt)


UNPATCHED = Simulation.run


def test_an_error_of_another_cause_is_none_of_the_users():
    class Broken(policy_class("fifo")):
        def shares(self, view, gpus, now_s):
            raise SystemError("broken")

    with pytest.raises(SystemError, match="broken"):
        run(Broken())


def test_another_handler_stays_in_force():
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


@pytest.mark.parametrize("broken_off", [KeyboardInterrupt, _as_a_kernel_has_it])
def test_ctrl_c_before_a_run_begins_is_told_in_a_word(broken_off, monkeypatch, capsys):
    def load(setup):
        raise broken_off()

    monkeypatch.setattr("shoal.sim.runner.load", load)
    with pytest.raises(SystemExit) as end:
        main(["sim", "run", "--sample"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "shoal: interrupted\n"
