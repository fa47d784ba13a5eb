"""The public measurements that the knowledge benches read, from shared/data next to the repository."""

from __future__ import annotations

import ast
import csv
import json
import sys
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
POLLUX = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
ACCURACIES = ("cifar10", "imagenet", "ncf")  # their validation metric rises to 1; the others' falls


def require_data() -> None:
    if not DATA.is_dir():
        sys.exit(f"the public measurements are missing: put them at {DATA}")


def print_json(document: dict) -> None:
    print(json.dumps(document, indent=1))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def config_speed() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By model: configurations (servers, workers, batch) and steps per second, without stalled rows."""
    found: dict[str, list] = {}
    for line in (DATA / "dl2" / "config_speed.txt").read_text().splitlines():
        model, _, batch, servers, workers, speeds, *_ = ast.literal_eval(line)
        if sum(speeds) > 0:
            found.setdefault(model, []).append((servers, workers, batch, sum(speeds) / batch))
    arrays = {model: np.array(rows, dtype=float) for model, rows in found.items()}
    return {model: (rows[:, :3], rows[:, 3]) for model, rows in arrays.items()}


def pollux_steps(model: str, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Configurations (gpus, nodes, samples per gpu) and seconds per step of one of Pollux' measurements."""
    rows = []
    for row in rows_of(DATA / "pollux" / model / f"{which}.csv"):
        if which == "placements":
            per_node = [int(digit) for digit in row["placement"]]
            gpus, nodes = sum(per_node), len(per_node)
        else:
            gpus, nodes = int(row["num_replicas"]), int(row["num_nodes"])
        rows.append((gpus, nodes, float(row["local_bsz"]), float(row["step_time"])))
    array = np.array(rows)
    return array[:, :3], array[:, 3]


def loss_curves(min_points: int = 10) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Measured validation curves as (model, steps, falling metric); an accuracy becomes an error rate."""
    curves = []
    for model in POLLUX:
        for path in sorted((DATA / "pollux" / model).glob("validation-*.csv")):
            rows = rows_of(path)
            if len(rows) >= min_points:
                steps = np.array([float(row["iteration"]) for row in rows])
                metric = np.array([float(row["metric"]) for row in rows])
                curves.append((model, steps, 1.0 - metric if model in ACCURACIES else metric))
    return curves


def scaling_curves() -> dict[str, dict[int, tuple[float, float]]]:
    """By name: gpus -> (seconds per step, samples per step), measured."""
    return {**_elasticflow_curves(), **_afs_curves(), **_pollux_curves()}


def _elasticflow_curves() -> dict[str, dict[int, tuple[float, float]]]:
    curves = {}
    for path in sorted(DATA.glob("elasticflow/throughputs_*/*.csv")):
        for row in rows_of(path):
            batch = float(row.pop("global_batch_size"))
            curve = {int(k): (1.0 / float(v), batch) for k, v in row.items() if v and float(v) > 0}
            if len(curve) >= 4:
                curves[f"elasticflow/{path.parent.name[12:]}/{path.stem}-{batch:.0f}"] = curve
    return curves


def _afs_curves() -> dict[str, dict[int, tuple[float, float]]]:
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows_of(DATA / "afs" / "profiles.csv"):
        seconds = float(row["seconds_per_iteration"])
        curves.setdefault(f"afs/{row['model']}", {})[int(row["gpus"])] = (seconds, 256.0)
    return {name: curve for name, curve in curves.items() if len(curve) >= 4}


def _pollux_curves() -> dict[str, dict[int, tuple[float, float]]]:
    """Weak scaling at the middle batch per GPU, on the fewest nodes that were measured for a size."""
    curves = {}
    for model in POLLUX:
        parts = [pollux_steps(model, which) for which in ("placements", "scalability")]
        configs, seconds = (np.concatenate(arrays) for arrays in zip(*parts))
        local = np.median(np.unique(configs[:, 2]))
        local = configs[np.argmin(np.abs(configs[:, 2] - local)), 2]
        curve: dict[int, tuple[float, float]] = {}
        for size in sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, 64} & {int(g) for g in configs[:, 0]}):
            here = (configs[:, 0] == size) & (configs[:, 2] == local)
            if here.any():
                fewest = configs[here, 1].min()
                chosen = here & (configs[:, 1] == fewest)
                curve[size] = (float(seconds[chosen].mean()), float(local * size))
        curves[f"pollux/{model}"] = curve
    return curves
