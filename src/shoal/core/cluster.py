"""A cluster: nodes with typed GPUs in a topology (domain, rack, node), and its users."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.limits import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. All its GPUs are of one type; `rack` and `domain` are its place in the topology."""

    name: str
    gpus: int
    gpu_type: str = "gpu"
    rack: str = "rack0"
    domain: str = "domain0"

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ShoalError(f"node {self.name!r} has {self.gpus} GPUs; it needs at least one")


@dataclass(frozen=True, slots=True)
class User:
    """An owner of jobs. `tickets` is the weight of the user's claim against the other active users."""

    name: str
    tickets: float = 1.0
    limits: Limits = NO_LIMITS
    #: The name of the user's group; empty for a user without one.
    group: str = ""

    def __post_init__(self) -> None:
        if not (self.tickets > 0 and np.isfinite(self.tickets)):
            raise ShoalError(f"user {self.name!r} has {self.tickets} tickets; give a positive number")


@dataclass(frozen=True, slots=True)
class Group:
    """A group of users. Its limits hold for all jobs of its users together.

    With `tickets`, the users of the group who have jobs divide these tickets in proportion to their own.
    """

    name: str
    tickets: float | None = None
    limits: Limits = NO_LIMITS

    def __post_init__(self) -> None:
        if self.tickets is not None and not (self.tickets > 0 and np.isfinite(self.tickets)):
            raise ShoalError(f"group {self.name!r} has {self.tickets} tickets; give a positive number")


@dataclass(frozen=True)
class Cluster:
    """The nodes and users of one cluster. The index of a node, type or user is its position in the tuple."""

    nodes: tuple[Node, ...]
    users: tuple[User, ...] = ()
    #: All GPUs form one pool without nodes, so that nothing can be fragmented.
    pooled: bool = field(default=False)
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ShoalError("a cluster needs at least one node")
        for what, names in (
            ("node", [n.name for n in self.nodes]),
            ("user", [u.name for u in self.users]),
            ("group", [g.name for g in self.groups]),
        ):
            if len(set(names)) != len(names):
                twice = next(n for n in names if names.count(n) > 1)
                raise ShoalError(f"two {what}s are called {twice!r}; names must differ")

    @classmethod
    def pool(cls, gpus: int, gpu_type: str = "gpu", users: Iterable[User] = ()) -> Cluster:
        """`gpus` interchangeable GPUs without nodes, as most published simulators assume."""
        return cls((Node("pool", gpus, gpu_type),), tuple(users), pooled=True)

    @classmethod
    def of(cls, count: int, gpus: int, gpu_type: str = "gpu", *, rack_nodes: int = 0) -> Cluster:
        """`count` equal nodes, `rack_nodes` per rack (0: all in one rack)."""
        per = rack_nodes or count
        return cls(tuple(Node(f"node{i}", gpus, gpu_type, f"rack{i // per}") for i in range(count)))

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types of the nodes, in order of first appearance."""
        return tuple(dict.fromkeys(n.gpu_type for n in self.nodes))

    @cached_property
    def type_of_node(self) -> IntArray:
        index = {t: i for i, t in enumerate(self.gpu_types)}
        return np.array([index[n.gpu_type] for n in self.nodes], np.int32)

    @cached_property
    def gpus_of_node(self) -> IntArray:
        return np.array([n.gpus for n in self.nodes], np.int32)

    @cached_property
    def rack_of_node(self) -> IntArray:
        """Rack index of each node. Racks of the same name in two domains are two racks."""
        keys = [(n.domain, n.rack) for n in self.nodes]
        index = {k: i for i, k in enumerate(dict.fromkeys(keys))}
        return np.array([index[k] for k in keys], np.int32)

    @cached_property
    def domain_of_node(self) -> IntArray:
        index = {d: i for i, d in enumerate(dict.fromkeys(n.domain for n in self.nodes))}
        return np.array([index[n.domain] for n in self.nodes], np.int32)

    @cached_property
    def gpus_of_type(self) -> IntArray:
        return np.bincount(
            self.type_of_node, weights=self.gpus_of_node, minlength=len(self.gpu_types)
        ).astype(np.int32)

    @cached_property
    def total_gpus(self) -> int:
        return int(self.gpus_of_node.sum())

    @cached_property
    def _user_index(self) -> dict[str, int]:
        return {u.name: i for i, u in enumerate(self.users)}

    def user_index(self, name: str) -> int:
        try:
            return self._user_index[name]
        except KeyError:
            hint = did_you_mean(name, self._user_index)
            raise ShoalError(f"there is no user {name!r}; {hint}") from None

    def type_index(self, gpu_type: str) -> int:
        try:
            return self.gpu_types.index(gpu_type)
        except ValueError:
            raise ShoalError(
                f"no node has GPUs of type {gpu_type!r}; {did_you_mean(gpu_type, self.gpu_types)}"
            ) from None

    def with_users(self, users: Iterable[User]) -> Cluster:
        return replace(self, users=tuple(users))

    @property
    def has_limits(self) -> bool:
        """Whether a user or a group has a limit."""
        return any(u.limits for u in self.users) or any(g.limits for g in self.groups)
