"""How many gloo groups form while a stranger connects to every port that the members listen on.

    python bench/gloo_strangers.py [--groups 40] [--connections 240]

Two workers form one group after the other, as in a resize, and do a collective in it. One of them is late by up to
0.2 s, as workers are. The stranger looks for their ports all the time, holds its connections open, and sends what gloo
takes for a member. Each group has 15 s; what fails is tried again, as the coordinator does.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

HOST, GROUP_S = "127.0.0.1", 15.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--connections", type=int, default=240)
    given = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    print(f"{given.groups} groups of 2 workers, {given.connections} connections of a stranger")
    for shoal, connections in ((False, 0), (True, 0), (False, given.connections), (True, given.connections)):
        name = "as Shoal forms them" if shoal else "gloo by itself"
        formed, seconds, tries = measure(given.groups, connections, shoal)
        who = "with the stranger" if connections else "alone"
        print(
            f"{name}, {who}: {formed} of {given.groups} formed at the first try, {tries:.2f} tries and "
            f"{seconds:.2f} s for each group"
        )


def measure(groups: int, connections: int, shoal: bool) -> tuple[int, float, float]:
    """(groups formed at the first try, seconds and tries for each)."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    queue: Any = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=work, args=(rank, port, groups, shoal, queue), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    over = threading.Event()
    stranger = threading.Thread(
        target=disturb, args=([w.pid for w in workers], port, connections, over), daemon=True
    )
    if connections:
        stranger.start()
    found = dict(queue.get() for _ in workers)
    over.set()
    for worker in workers:
        worker.join()
    tries, seconds = found[0]
    return sum(count == 1 for count in tries), statistics.mean(seconds), statistics.mean(tries)


def work(rank: int, port: int, groups: int, shoal: bool, queue: Any) -> None:
    import torch.distributed as dist

    import torch

    store = dist.TCPStore(HOST, port, 2, is_master=rank == 0, timeout=timedelta(seconds=300))
    late = random.Random(rank)
    tries: list[int] = []
    seconds: list[float] = []
    for number in range(groups):
        begin_s, ok, count = time.monotonic(), False, 0
        while not ok:
            count += 1
            name = f"{number}.{count}"
            meet(store, f"{name} begin", rank)
            time.sleep(late.uniform(0.0, 0.2))
            try:
                group = form(dist, store, rank, name, shoal)
                tensor = torch.ones(1000)
                group.allreduce([tensor]).wait(timedelta(seconds=GROUP_S))
                ok = bool(tensor.eq(2.0).all())
            except Exception:
                ok = False
            # Both try again if one of them failed, as the coordinator would have it.
            store.set(f"{name} of {rank}", b"1" if ok else b"0")
            ok = store.get(f"{name} of {1 - rank}") == b"1" and ok
        tries.append(count)
        seconds.append(time.monotonic() - begin_s)
    meet(store, "end", rank)
    queue.put((rank, (tries, seconds)))
    time.sleep(1.0)


def meet(store: Any, name: str, rank: int) -> None:
    store.set(f"{name} {rank}", b"1")
    store.wait([f"{name} {1 - rank}"], timedelta(seconds=300))


def form(dist: Any, store: Any, rank: int, name: str, shoal: bool) -> Any:
    from shoal.torch.group import form_gloo, gather

    named, members = dist.PrefixStore(name, store), ("w0", "w1")
    if shoal:
        gather(named, members, members[rank])
        return form_gloo(named, members, members[rank], HOST, b"secret", name)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=GROUP_S)
    options._threads = 2
    return dist.ProcessGroupGloo(named, rank, 2, options)


def disturb(pids: list[int | None], known: int, connections: int, over: threading.Event) -> None:
    """Connect to all ports of these processes but the known one, and hold `connections` of them."""
    held: list[socket.socket] = []
    seen: dict[int, int] = {}
    while not over.is_set():
        for port in {port for pid in pids for port in ports_of(pid)} - {known}:
            seen[port] = seen.get(port, 0) + 1
            if seen[port] > connections:
                continue
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex((HOST, port))
            held.append(stranger)
            with contextlib.suppress(OSError):
                stranger.send((seen[port] % 4).to_bytes(8, "little"))
        while len(held) > connections:
            held.pop(0).close()
        time.sleep(0.0005)


def ports_of(pid: int | None) -> list[int]:
    """Where a process listens."""
    try:
        with open(f"/proc/{pid}/net/tcp") as file:
            rows = [line.split() for line in file][1:]
        ports = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
        links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    return [ports[link[8:-1]] for link in links if link[8:-1] in ports]


if __name__ == "__main__":
    main()
