"""What Transformers uses of MLflow. Its runs are files in OUTPUT_DIR/runs: their tags, and a line for each step."""

import json
import os
import uuid
from pathlib import Path
from types import SimpleNamespace

__version__ = "3.5.1"
utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
RUNS = Path(os.environ["OUTPUT_DIR"]) / "runs"
_active = None


def is_tracking_uri_set():
    return True


def get_tracking_uri():
    return str(RUNS)


def active_run():
    return _active


def start_run(run_name=None, nested=False):
    global _active
    assert _active is None, "a run is active already"
    _active = _run(os.environ.pop("MLFLOW_RUN_ID", None) or uuid.uuid4().hex)
    if not _file(_active).exists():
        RUNS.mkdir(parents=True, exist_ok=True)
        _write({"tags": json.loads(os.environ["MLFLOW_RUN_CONTEXT"])})


def end_run():
    global _active
    _write({"ended": os.environ["SHOAL_WORKER"]})
    _active = None


def log_params(params, synchronous=True):
    pass


def log_metrics(metrics, step, synchronous=True):
    _write({"step": step, **metrics})


def search_runs(filter_string, search_all_experiments, output_format):
    assert search_all_experiments
    assert output_format == "list"
    name, _, value = filter_string.removeprefix("tags.`").replace("` = ", "=").partition("=")
    runs = [(path.stem, path.read_text().splitlines()[0]) for path in RUNS.glob("*.jsonl")]
    return [_run(run) for run, first in runs if json.loads(first)["tags"][name] == value.strip("'")]


def _run(run):
    return SimpleNamespace(info=SimpleNamespace(run_id=run))


def _file(run):
    return RUNS / f"{run.info.run_id}.jsonl"


def _write(row):
    with _file(_active).open("a") as file:
        print(json.dumps(row), file=file)
