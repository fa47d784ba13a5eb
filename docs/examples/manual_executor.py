"""An executor of one's own: it starts nothing, and workers end when a person says so."""

import asyncio

from shoal.executors.base import Exit, NodeInfo


class ManualExecutor:
    """Two virtual GPUs on one node. `finish(worker)` ends a worker with exit code 0."""

    name = "manual"

    def __init__(self):
        self.on_exit = lambda exit_: None  # the control plane replaces it
        self.on_node = lambda change: None  # never called: the nodes of this executor do not change
        self.running = {}

    def nodes(self):
        return (NodeInfo("n0", 2, "virtual", virtual=True),)

    def awaited_nodes(self):
        return ()

    def start(self, worker):
        self.running[worker.worker] = worker

    def stop(self, worker, *, kill=False):
        if self.running.pop(worker, None) is not None:
            self._report(Exit(worker, None, "SIGTERM", "", asked_to_end=True))

    def finish(self, worker):
        del self.running[worker]
        self._report(Exit(worker, 0, None, ""))

    def adopt(self, worker, directory):
        if worker not in self.running:
            self._report(Exit(worker, None, None, "it has ended", began=False))

    def suspend(self, worker):
        pass

    def wake(self, worker):
        pass

    def warn(self, worker, signal):
        pass

    def go(self, worker):
        pass

    def free_port(self, node):
        return 29500

    def logs(self, directory, begin, max_bytes=256 * 1024):
        return []

    def tail_position(self, directory, lines):
        return 0

    def usage(self):
        return {}

    def warm_up(self):
        pass

    def close(self):
        pass

    def _report(self, exit_):
        """Calls must return at once, so the control plane hears of the end in the next turn of the event loop."""
        asyncio.get_running_loop().call_soon(self.on_exit, exit_)
