"""The rule of elastic capacity, by examples and by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines.base import (
    AgentCommand,
    Machine,
    MachineState,
    NewMachine,
    describe_waiting,
    machine_prefix,
)
from shoal.engines.capacity import (
    MAX_RETRY_S,
    CapacityChange,
    CapacityLimits,
    Demand,
    HeldMachine,
    IdleTimes,
    decide_capacity,
    retry_delay_s,
)

A100 = NewMachine(4, "a100")


def held(
    id: str,
    free: int,
    idle_s: float = 0.0,
    coming: bool = False,
    gpu_type: str = "a100",
    usable: bool = True,
) -> HeldMachine:
    return HeldMachine(id, 4, gpu_type, free, coming, idle_s, usable)


BUSY, IDLE, LONG_IDLE = held("busy", 0), held("idle", 4, 10), held("long", 4, 600)
COMING = held("coming", 4, 0, coming=True)
DRAINED, LONG_DRAINED = held("drained", 4, 10, usable=False), held("drained", 4, 600, usable=False)

CASES = {
    "the minimum is requested without any job": (2, 4, [], [], CapacityChange((A100,) * 2)),
    "jobs that wait get machines for their GPUs": (0, 9, [Demand(5), Demand(4)], [BUSY], CapacityChange((A100,) * 3)),
    "never more than the maximum": (0, 2, [Demand(99)], [BUSY], CapacityChange((A100,) * 1)),
    "free GPUs serve the demand first": (0, 9, [Demand(4)], [BUSY, IDLE], CapacityChange()),
    "machines that are coming count": (0, 9, [Demand(4)], [BUSY, COMING], CapacityChange()),
    "a type that new machines do not have": (0, 9, [Demand(4, ("v100",))], [BUSY], CapacityChange()),
    "free GPUs of another type do not serve": (
        0, 9, [Demand(4, ("a100",))], [held("v", 4, gpu_type="v100")], CapacityChange((A100,) * 1),
    ),
    "typed demand chooses first": (
        0, 9, [Demand(4), Demand(4, ("a100",))], [IDLE, held("v", 4, gpu_type="v100")], CapacityChange(),
    ),
    "idle for long: returned": (0, 4, [], [BUSY, IDLE, LONG_IDLE], CapacityChange((), ("long",))),
    "not below the minimum": (3, 4, [], [BUSY, IDLE, LONG_IDLE], CapacityChange()),
    "kept while a job could use it": (0, 4, [Demand(1)], [LONG_IDLE], CapacityChange()),
    "a gap on a busy machine frees the idle one": (
        0, 4, [Demand(1)], [held("half", 2), LONG_IDLE], CapacityChange((), ("long",)),
    ),
    "requests that nobody wants are withdrawn first": (
        1, 4, [], [held("asked", 4, 700, coming=True), held("older", 4, 900)], CapacityChange((), ("asked",)),
    ),
    "the one that was idle the longest goes first": (
        1, 4, [], [held("a", 4, 700), held("b", 4, 900)], CapacityChange((), ("b",)),
    ),
    "free GPUs that no job gets serve no demand": (0, 9, [Demand(4)], [DRAINED], CapacityChange((A100,))),
    "a machine that no job gets is returned even at the minimum": (
        2, 2, [Demand(4)], [LONG_DRAINED, BUSY], CapacityChange((), ("drained",)),
    ),
    "and counts as one of those to return": (
        1, 4, [], [LONG_DRAINED, LONG_IDLE], CapacityChange((), ("drained",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_capacity(case: str) -> None:
    low, high, demand, machines, want = CASES[case]
    assert decide_capacity(CapacityLimits(low, high), demand, machines, [A100]) == want


def test_each_type_is_requested_where_it_is_offered() -> None:
    limits = CapacityLimits(0, 9)
    any_, v100 = NewMachine(4), NewMachine(8, "v100")
    asked = decide_capacity(limits, [Demand(5, ("v100",)), Demand(5)], [], [any_, v100]).request
    assert asked == (v100, any_), "3 GPUs of the v100 machine and 4 of another serve all"
    few = [NewMachine(4, "a100", count=1), NewMachine(2, "v100", count=1)]
    assert decide_capacity(limits, [Demand(99)], [], few).request == (A100, NewMachine(2, "v100"))
    assert decide_capacity(CapacityLimits(3, 9), [], [], few).request == (A100, NewMachine(2, "v100"))
    assert decide_capacity(limits, [Demand(1, ("h200",))], [], few) == CapacityChange()


TYPES = st.sampled_from(["a100", "v100"])


@st.composite
def machines_of_any_kind(draw: st.DrawFn) -> list[HeldMachine]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        gpus = draw(st.integers(1, 8))
        coming = draw(st.booleans())
        free = gpus if coming else draw(st.integers(0, gpus))
        usable = coming or draw(st.booleans())
        idle_s = draw(st.floats(0, 2000))
        found.append(HeldMachine(f"m{number}", gpus, draw(TYPES), free, coming, idle_s, usable))
    return found


LIMITS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda r: CapacityLimits(min(r), max(r)))
DEMANDS = st.lists(st.builds(Demand, st.integers(0, 20), st.lists(TYPES, max_size=2).map(tuple)), max_size=5)
NEW = st.lists(st.builds(NewMachine, st.integers(1, 8), st.none() | TYPES), min_size=1, max_size=3)


@given(LIMITS, DEMANDS, machines_of_any_kind(), NEW)
def test_the_range_holds_and_no_busy_or_fresh_machine_is_returned(
    limits: CapacityLimits, demand: list[Demand], machines: list[HeldMachine], new: list[NewMachine]
) -> None:
    change = decide_capacity(limits, demand, machines, new)
    by_id = {m.id: m for m in machines}
    assert not (change.request and change.release)
    assert len(set(change.release)) == len(change.release)
    if change.request:
        assert len(machines) + len(change.request) <= limits.max_machines
    if any(by_id[id].usable for id in change.release):
        assert len(machines) - len(change.release) >= limits.min_machines
    for id in change.release:
        assert not by_id[id].busy
        assert by_id[id].idle_for_s >= limits.idle_s
    assert len(machines) + len(change.request) >= min(limits.min_machines, limits.max_machines)


@given(LIMITS, DEMANDS, machines_of_any_kind(), NEW)
def test_one_decision_is_enough_and_is_not_taken_back(
    limits: CapacityLimits, demand: list[Demand], machines: list[HeldMachine], new: list[NewMachine]
) -> None:
    machines = [replace(m, usable=True) for m in machines]
    change = decide_capacity(limits, demand, machines, new)
    left = [m for m in machines if m.id not in change.release]
    left += [
        HeldMachine(f"n{i}", asked.gpus, asked.gpu_type or "", asked.gpus, coming=True)
        for i, asked in enumerate(change.request)
    ]
    again = decide_capacity(limits, demand, left, new)
    makes_room = change.release and len(machines) >= limits.max_machines  # for a type that is wanted
    assert makes_room or not again.request, "a request is made once, and a return causes no request"
    assert not {id for id in again.release if id.startswith("n")}
    if not change.request and not makes_room:
        assert again == CapacityChange()


@given(LIMITS, DEMANDS, machines_of_any_kind(), NEW, st.randoms())
def test_the_order_of_the_machines_does_not_matter(
    limits: CapacityLimits,
    demand: list[Demand],
    machines: list[HeldMachine],
    new: list[NewMachine],
    random: object,
) -> None:
    shuffled = list(machines)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis types it as object here
    assert decide_capacity(limits, demand, shuffled, new) == decide_capacity(limits, demand, machines, new)


@given(DEMANDS, machines_of_any_kind(), NEW)
def test_all_machines_are_returned_in_the_end_if_nothing_wants_them(
    demand: list[Demand], machines: list[HeldMachine], new: list[NewMachine]
) -> None:
    idle = [replace(m, free_gpus=m.gpus, idle_for_s=600.0) for m in machines]
    assert set(decide_capacity(CapacityLimits(0, 99), [], idle, new).release) == {m.id for m in machines}


def test_idle_times_start_anew_with_each_use() -> None:
    times = IdleTimes()
    assert times.update(100.0, ["a", "b"], ["b"]) == {"a": 0.0, "b": 0.0}
    assert times.update(130.0, ["a", "b"], []) == {"a": 30.0, "b": 30.0}
    assert times.update(150.0, ["a", "b"], ["a"]) == {"a": 0.0, "b": 50.0}
    assert times.update(160.0, ["a"], []) == {"a": 10.0}
    assert times.update(170.0, ["a", "b"], []) == {"a": 20.0, "b": 0.0}, "a machine that returns is new"


def test_requests_that_fail_are_repeated_ever_more_slowly() -> None:
    delays = [retry_delay_s(failures) for failures in range(12)]
    assert delays == sorted(delays)
    assert (delays[0], delays[1], delays[-1]) == (0.0, 15.0, MAX_RETRY_S)


@pytest.mark.parametrize(("low", "high", "idle"), [(-1, 2, 1), (3, 2, 1), (0, 1, -1), (0, 1, float("nan"))])
def test_impossible_limits_are_refused(low: int, high: int, idle: float) -> None:
    with pytest.raises(ValueError, match=r"range|idle"):
        CapacityLimits(low, high, idle)


def test_what_is_said_of_machines_that_are_not_up() -> None:
    def machine(id: str, state: MachineState, reason: str = "") -> Machine:
        return Machine(id, f"slurm-{id}", state, reason=reason)

    up, pending = machine("1", MachineState.UP), machine("4711", MachineState.PENDING, "Priority")
    assert describe_waiting("Slurm", "job", [up]) is None
    assert describe_waiting("Slurm", "job", [up, pending, machine("4712", MachineState.REQUESTED)]) == (
        "2 machines requested from Slurm; job 4711 is pending there (Priority), job 4712 is requested there"
    )
    many = describe_waiting("Ray", "actor", [pending] * 5)
    assert many is not None
    assert many.endswith("2 more are not up yet")


@pytest.mark.parametrize("home", ["", "a b", "../x", "a-b", "x" * 33])
def test_a_home_id_that_could_mean_another_home_is_refused(home: str) -> None:
    with pytest.raises(ValueError, match="home id"):
        machine_prefix(home)


def test_names_that_a_shell_would_read_otherwise_are_refused() -> None:
    for bad in (
        {"env": {"A B": "1"}},
        {"env": {"A;id": "1"}},
        {"files": {"../x": b""}},
        {"files": {"a/b": b""}},
    ):
        with pytest.raises(ValueError, match="is no"):
            AgentCommand(("true",), **bad)
    with pytest.raises(ValueError, match="empty"):
        AgentCommand(())
