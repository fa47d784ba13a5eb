"""One rank of a fixed gang: all meet at MASTER_ADDR and MASTER_PORT, as torchrun scripts do."""

import os
import socket
import time

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
print(
    f"rank {rank} local {os.environ['LOCAL_RANK']} at {os.environ['SHOAL_HOST']} master {where[0]}",
    flush=True,
)
if rank == 0:
    with socket.create_server(where) as server:
        met = sorted(int(server.accept()[0].recv(8)) for _ in range(world - 1))
    print(f"met {met}", flush=True)
else:
    while True:
        try:
            with socket.create_connection(where) as mine:
                mine.sendall(str(rank).encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
