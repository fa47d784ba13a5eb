"""Which worker owns which GPU. A GPU gets its next owner only after the last one has released it.

Besides its owner, a GPU may have co-located workers, which share it or prepare on it. They own nothing, so no
GPU counts twice. A GPU with co-located workers is not given to other newcomers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

Device = tuple[int, int]
"""(node index, GPU index on the node)."""


class Devices:
    """Every GPU has no owner or one: a worker."""

    def __init__(self, gpus_of_node: Iterable[int]) -> None:
        self._gpus = list(gpus_of_node)
        self._owner: dict[Device, str] = {}
        self._free: list[set[int]] = [set(range(n)) for n in self._gpus]
        self._colocated: dict[Device, set[str]] = {}
        #: GPUs that still hold the memory of a suspended worker: others take them last.
        self._kept_warm: dict[Device, str] = {}

    def set_gpus(self, node: int, gpus: int) -> None:
        """The node has so many GPUs: a new one, which is the next, or one that has changed.

        Workers on GPUs that are gone own them until they have ended.
        """
        if node == len(self._gpus):
            self._gpus.append(0)
            self._free.append(set())
        before, self._gpus[node] = self._gpus[node], gpus
        owned = {gpu for n, gpu in self._owner if n == node}
        self._free[node] |= set(range(before, gpus)) - owned
        self._free[node] -= set(range(gpus, before))

    @property
    def used(self) -> int:
        return len(self._owner)

    def used_of(self, node: int) -> int:
        return self._gpus[node] - len(self._free[node])

    def owner(self, device: Device) -> str | None:
        return self._owner.get(device)

    def choose(self, wanted: dict[int, int], beside: Collection[Device] = ()) -> list[Device] | None:
        """Free GPUs, `wanted[node]` of each node, or None if there are too few. GPUs not kept warm come first.

        `beside` are GPUs whose co-located workers wait for the job that asks: it may take them, and does so first.
        """
        chosen: list[Device] = []
        for node, count in sorted(wanted.items()):
            at = [(node, gpu) for gpu in self._free[node]]
            vacant = [device for device in at if device not in self._colocated or device in beside]
            free = sorted(vacant, key=lambda d: (d not in beside, d in self._kept_warm, d))
            if len(free) < count:
                return None
            chosen += free[:count]
        return chosen

    def is_free(self, device: Device, worker: str = "") -> bool:
        """Whether the GPU has no owner and no co-located worker other than this one."""
        node, gpu = device
        return gpu in self._free[node] and self.colocated_on(device) <= {worker}

    @property
    def has_colocated(self) -> bool:
        return bool(self._colocated)

    def colocated_on(self, device: Device) -> set[str]:
        return self._colocated.get(device, set())

    def colocate(self, device: Device, worker: str) -> None:
        self._colocated.setdefault(device, set()).add(worker)

    def _part(self, device: Device, worker: str) -> None:
        there = self._colocated.get(device, set())
        there.discard(worker)
        if not there:
            self._colocated.pop(device, None)

    def give(self, device: Device, worker: str) -> None:
        node, gpu = device
        if gpu not in self._free[node]:
            raise ValueError(
                f"GPU {gpu} of node {node} belongs to {self._owner.get(device)}, not to {worker}"
            )
        self._free[node].discard(gpu)
        self._owner[device] = worker
        self._part(device, worker)
        if self._kept_warm.get(device) == worker:
            del self._kept_warm[device]

    def take_back(self, device: Device, worker: str, *, keep_warm: bool = False) -> None:
        """The worker releases the GPU. Nothing happens if it neither owns it nor is co-located on it."""
        self._part(device, worker)
        if self._owner.get(device) == worker:
            del self._owner[device]
            if device[1] < self._gpus[device[0]]:
                self._free[device[0]].add(device[1])
            if keep_warm:
                self._kept_warm[device] = worker
        elif not keep_warm and self._kept_warm.get(device) == worker:
            del self._kept_warm[device]

    def check(self) -> None:
        """What must always hold."""
        for node, count in enumerate(self._gpus):
            owned = {gpu for n, gpu in self._owner if n == node}
            assert owned | self._free[node] >= set(range(count)), (node, owned, self._free[node])
            assert self._free[node] <= set(range(count)), (node, self._free[node])
            assert not owned & self._free[node]
        for device, there in self._colocated.items():
            assert there, device
            assert self._owner.get(device) not in there, (device, there)
