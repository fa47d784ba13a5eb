"""A real Ray cluster of several raylets on loopback addresses: a head without GPUs and two nodes of 4 GPUs.

Ray rewrites 127.0.0.1 to the machine's own address, so the nodes use 127.0.0.2 and up.
"""

from __future__ import annotations

import os
import signal
from typing import Any

HEAD = "127.0.0.100"
STORE_BYTES = 80 << 20
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 6,
    "gcs_rpc_server_reconnect_timeout_s": 10,
}


class RayCluster:
    def __init__(self, types: tuple[str, str] = ("A100", "V100")) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": HEAD, "_system_config": HEALTH}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**head, "object_store_memory": STORE_BYTES}
        )
        self.address: str = self._cluster.address
        self._nodes: dict[str, Any] = {}
        self.add_node("gpu-1", "127.0.0.2", types[0], "r1")
        self.add_node("gpu-2", "127.0.0.3", types[1], "r2")

    def add_node(self, name: str, address: str, gpu_type: str, rack: str) -> None:
        self._nodes[name] = self._cluster.add_node(
            wait=False,
            num_cpus=2,
            num_gpus=4,
            node_ip_address=address,
            node_name=name,
            labels={"gpu": gpu_type, "rack": rack},
            object_store_memory=STORE_BYTES,
        )

    def kill_node(self, name: str) -> None:
        """SIGKILL of a raylet. It is reaped: as a zombie it would keep its actors alive."""
        process = self._nodes.pop(name).all_processes["raylet"][0].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def kill_head(self) -> None:
        """SIGKILL of the head's GCS, which knows all nodes and actors. Ray's own processes end some seconds later."""
        process = self._cluster.head_node.all_processes["gcs_server"][0].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        self._cluster.shutdown()
