"""Examples for the description of the API: ada's job on a cluster of four GPUs."""

from __future__ import annotations

from typing import Any

AT = "2026-01-31T12:00:00Z"
SPEC = {"command": ["python", "train.py"], "gpus": "1..4"}
JOB_REF = {
    "id": 7, "name": "resnet-a", "user": "ada", "state": "running", "gpus": 2, "target_gpus": 2, "min_gpus": 1,
    "max_gpus": 4,
}  # fmt: skip
JOB = JOB_REF | {
    "gpu_type": "V100", "requested_gpus": 4, "resize": "live", "command": SPEC["command"], "workdir": "/home/ada",
    "submitted_at": AT, "step": 410, "total_steps": 1000, "progress": 0.41, "speed": 9.4,
}  # fmt: skip
REASON = {
    "code": "NotWorthIt",
    "sentence": "it has 2 GPUs; one more would add 31 % to its speed, and is worth more where it is",
    "evidence": {"gpus": 2, "free_gpus": 0, "next_gpu_gain": 0.31},
}
WHY = {
    "job": JOB_REF,
    "reason": REASON,
    "sentence": f"resnet-a is running: {REASON['sentence']}",
    "policy": "fair-afs",
    "ahead": [JOB_REF | {"id": 9, "name": None, "user": "ben"}],
    "ahead_total": 1,
    "grows_in": {"low_s": 50, "high_s": 70, "basis": "a job of ben ends, by the job's own count of steps"},
    "could": [
        {
            "change": "min_gpus",
            "value": 3,
            "sentence": "with a minimum of 3 GPUs it would have them now: shoal scale resnet-a --min 3",
        }
    ],
}
PROFILE = {
    "job": JOB_REF,
    "basis": "measured at 2 sizes",
    "points": [{"gpus": 1, "speed": 5.1, "measured": True}],
    "remaining": {"low_s": 50, "high_s": 70, "basis": "the job's own count of steps"},
}
PLAN = {"verdict": "starts", "gpus": 4, "sentence": "it would start now with 4 GPUs"}
EVENT = {
    "id": 42, "at": AT, "type": "job.target", "actor": "system", "job": 7, "job_name": "resnet-a", "user": "ada",
    "plan": 12, "cause": 40, "message": "grow: 2 -> 4 GPUs", "data": {"verb": "grow", "from_gpus": 2, "to_gpus": 4},
}  # fmt: skip
LOG_LINE = {"at": AT, "worker": "7.0", "rank": 0, "text": "epoch 1: loss 0.42"}
SHARE = {
    "user": "ada", "tickets": 2, "gpus": 2, "entitled_gpus": 2.67, "running_jobs": 1, "pending_jobs": 0,
    "entitled_gpu_s": 1601, "received_gpu_s": 1580, "lent_gpu_s": 21, "borrowed_gpu_s": 0, "traded_gpu_s": 0,
}  # fmt: skip
NODE = {"name": "local", "gpu_type": "V100", "gpus": 4, "used": 2, "virtual": False}
STATUS = {
    "version": "0.1.0", "home": "/var/lib/shoal", "pid": 4711, "address": "http://127.0.0.1:8080", "started_at": AT,
    "executor": "local", "virtual": False, "policy": "fair-afs", "nodes": [NODE], "total_gpus": 4, "used_gpus": 2,
    "jobs": {"running": 1}, "user": "ada", "role": "user",
}  # fmt: skip
CHECK = {"name": "disk", "status": "ok", "message": "70.2 GiB are free at /var/lib/shoal"}
POLICY = {
    "name": "max-min", "summary": "equal shares for all, up to what each can use", "elastic": True,
    "needs_lengths": False,
}  # fmt: skip
USER = {
    "name": "ada", "role": "user", "tickets": 2, "created_at": AT, "group": "vision", "limits": {"max_gpus": 8},
    "use": {"gpus": 2, "running_jobs": 1},
}  # fmt: skip
GROUP = {
    "name": "vision", "tickets": 3, "limits": {"max_gpus": 16, "gpu_hours_per_week": 500}, "users": ["ada", "ben"],
    "use": {"gpus": 6, "running_jobs": 3, "gpu_hours_of_week": 211.5}, "created_at": AT,
}  # fmt: skip
WEBHOOK = {
    "id": 1, "user": "ada", "url": "https://example.com/...", "format": "json", "events": ["failed", "finished"],
    "created_at": AT, "sent": 12,
}  # fmt: skip
ARRAY = {
    "id": 2, "name": "sweep", "user": "ada", "tasks": 100, "max_running": 8, "created_at": AT,
    "jobs": {"running": 8, "pending": 92}, "first": 12, "last": 111,
}  # fmt: skip
TOKEN = {"id": 3, "user": "ada", "label": "laptop", "created_at": AT}

REFUSED_AGENT = {"agent": "gpu7", "address": "10.0.0.7", "why": "the join token has expired", "at": AT}
JOIN_TOKEN = {"id": "9f2c41d07ab3", "expires_at": AT, "used_by": None}
JOIN_TOKEN_CREATED = JOIN_TOKEN | {"token": "shoal-join:...", "address": "10.0.0.1:7600"}


def shown(example: dict[str, Any]) -> dict[str, Any]:
    """The argument of a model: `class Job(BaseModel, json_schema_extra=shown(JOB))`."""
    return {"example": example}
