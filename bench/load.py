"""How many submissions does a real server take? 2,000 short jobs from 4 clients, while another reads the list of jobs.

The server runs as `shoal up` starts it and runs the jobs (`true`) as processes. Clients submit one job after the other,
each on its own connection, as fast as they are answered. A reader asks for `GET /jobs` all the time. The figures count
from the first to the last submission. A machine that is busy with other things answers later: so the CPU seconds of the
server per submission are given, too, and the wall seconds of a fixed piece of work before and after. At the end an
array of 1,000 jobs is submitted in one call, and `shoal ps` lists it. With `--waiting` the jobs do not begin, as
most jobs of a full cluster do not: then no process of a job competes with the server for the processors.

    python bench/load.py [--jobs 2000] [--clients 4] [--gpus 4] [--policy fifo] [--waiting]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil

from _figures import print_figures

#: An array of 1,000 jobs is to be submitted in less than this.
ARRAY_TARGET_S = 2.0
BODY = {"command": ["true"], "workdir": "/", "gpus": "1"}
LATER = {"not_before": "2999-01-01T00:00:00Z"}


def fixed_work_s() -> float:
    """Wall seconds of the same work on one core: how busy the machine is."""
    began, total = time.perf_counter(), 0
    for i in range(2_000_000):
        total += i * i
    return time.perf_counter() - began


class Load:
    def __init__(self, address: str, token: str, body: dict[str, object], jobs: int, clients: int) -> None:
        self._address, self._headers = address, {"Authorization": f"Bearer {token}"}
        self._body = body
        self._jobs, self._clients = jobs, clients
        self.submit_s: list[float] = []
        self.list_s: list[float] = []
        self.errors: list[str] = []
        self._done = threading.Event()

    def run(self) -> float:
        """Submit all jobs. Return the seconds that it took."""
        submitters = [threading.Thread(target=self._submit, args=(i,)) for i in range(self._clients)]
        reader = threading.Thread(target=self._read)
        reader.start()
        began = time.perf_counter()
        for thread in submitters:
            thread.start()
        for thread in submitters:
            thread.join()
        took_s = time.perf_counter() - began
        self._done.set()
        reader.join()
        return took_s

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self._address}/api/v1", headers=self._headers, timeout=60)

    def _submit(self, client: int) -> None:
        with self._client() as http:
            for _ in range(client, self._jobs, self._clients):
                began = time.perf_counter()
                reply = http.post("/jobs", json=self._body)
                self.submit_s.append(time.perf_counter() - began)
                if reply.status_code != 201:
                    self.errors.append(reply.text)

    def _read(self) -> None:
        with self._client() as http:
            while not self._done.is_set():
                began = time.perf_counter()
                reply = http.get("/jobs")
                self.list_s.append(time.perf_counter() - began)
                if reply.status_code != 200:
                    self.errors.append(reply.text)
                time.sleep(0.02)


def milliseconds(times_s: list[float]) -> dict[str, float]:
    percentiles = np.percentile(np.array(times_s) * 1e3, [50, 99])
    return {"p50": round(float(percentiles[0]), 1), "p99": round(float(percentiles[1]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--waiting", action="store_true", help="jobs that do not begin")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        command = [sys.executable, "-m", "shoal.server.serve", "--home", str(home)]
        command += ["--gpus", str(options.gpus), "--policy", options.policy]
        with (Path(place) / "server.log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            figures = measure(home, server, options)
        finally:
            server.kill()
            server.wait()
    print_figures(figures)


def measure(home: Path, server: subprocess.Popen[bytes], options: argparse.Namespace) -> dict[str, object]:
    while not (home / "server.json").exists():
        assert server.poll() is None
        time.sleep(0.05)
    address = json.loads((home / "server.json").read_text())["address"]
    token = (home / "admin.token").read_text().strip()
    body = BODY | (LATER if options.waiting else {})
    load = Load(address, token, body, options.jobs, options.clients)
    process, before_s = psutil.Process(server.pid), fixed_work_s()
    began_mb, cpu = process.memory_info().rss / 1e6, process.cpu_times()
    took_s = load.run()
    now = process.cpu_times()
    cpu_s = now.user + now.system - cpu.user - cpu.system
    of_jobs_s = now.children_user + now.children_system - cpu.children_user - cpu.children_system
    after_s = fixed_work_s()
    with load._client() as http:
        over = "pending" if options.waiting else "succeeded"
        while (counts := http.get("/status").json()["jobs"]).get(over, 0) < options.jobs:
            time.sleep(0.5)
            assert set(counts) <= {"succeeded", "pending", "starting", "running"}, counts
        ended_mb = process.memory_info().rss / 1e6
        array_s, ps_s, ps_lines = measure_array(http, home)
        http.post("/shutdown", json={"jobs": "stop"})
    per_s, lists = options.jobs / took_s, milliseconds(load.list_s)
    return {
        "jobs": options.jobs,
        "jobs_begin": not options.waiting,
        "submissions_per_s": round(per_s, 1),
        "server_cpu_ms_per_submission": round(1e3 * cpu_s / options.jobs, 2),
        "server_share_of_one_core": round(cpu_s / took_s, 2),
        "jobs_share_of_one_core": round(of_jobs_s / took_s, 2),
        "submit_ms": milliseconds(load.submit_s),
        "list_ms": lists,
        "lists": len(load.list_s),
        "errors": load.errors[:5],
        "resident_mb": [round(began_mb), round(ended_mb)],
        "fixed_work_s": [round(before_s, 3), round(after_s, 3)],
        "array_of_1000_s": round(array_s, 2),
        "ps_of_the_array_s": round(ps_s, 2),
        "ps_lines_of_the_array": ps_lines,
        "target": {
            "submissions_per_s": 150,
            "list_ms_p99": 100,
            "array_of_1000_s": ARRAY_TARGET_S,
            "ps_lines_of_the_array": 1,
        },
        "reached": {
            "submissions_per_s": per_s >= 150,
            "list_ms_p99": lists["p99"] <= 100,
            "array_of_1000_s": array_s < ARRAY_TARGET_S,
            "ps_lines_of_the_array": ps_lines == 1,
        },
    }


def measure_array(http: httpx.Client, home: Path) -> tuple[float, float, int]:
    """(seconds of the submission, seconds of `shoal ps`, lines of the array in its table)."""
    body = BODY | LATER | {"array": "0-999%8", "name": "many"}
    began = time.perf_counter()
    reply = http.post("/arrays", json=body)
    array_s = time.perf_counter() - began
    assert reply.status_code == 201, reply.text
    command = [sys.executable, "-m", "shoal.cli.main", "ps", "--home", str(home)]
    began = time.perf_counter()
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ps_s = time.perf_counter() - began
    return array_s, ps_s, sum(line.startswith("many") for line in shown.splitlines())


if __name__ == "__main__":
    main()
