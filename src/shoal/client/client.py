"""`Client`: one method per request of the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from shoal.client.connection import Connection, made, parsed, segment
from shoal.client.errors import ClientError, TimedOut
from shoal.server.api import models as m

JobId = int | str


class Client(Connection):
    """A client of one server. Every method raises a `ClientError` with a one-line message and an exit code."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # jobs

    def submit(self, spec: m.JobSpec, *, idempotency_key: str | None = None) -> m.Job:
        """Submit a job. With a key, a repeated request, for example after a lost answer, creates no second job."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self.call("POST", "jobs", m.Job, body=spec, headers=headers)

    def plan(self, spec: m.JobSpec) -> m.PlanOutcome:
        """What would happen if this job were submitted now. Changes nothing."""
        return self.call("POST", "plan", m.PlanOutcome, body=m.PlanRequest(spec=spec))

    def jobs(
        self,
        *,
        states: list[str] | None = None,
        active: bool | None = None,
        user: str | None = None,
        name: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
    ) -> list[m.Job]:
        """The jobs that you may see, newest first, at most `limit`."""
        query = {
            "state": ",".join(states) if states else None,
            "active": active,
            "user": user,
            "name": name,
            "since": since,
        }
        return self.pages("jobs", m.JobList, query, limit)

    def job(self, job: JobId) -> m.Job:
        return self.call("GET", _job(job), m.Job)

    def why(self, job: JobId, *, at: datetime | None = None, preempted: bool = False) -> m.Why:
        """Why the job has its GPUs, which jobs are ahead, when it may start, and what would start it now.

        `at` explains an earlier moment. `preempted` adds the jobs that last took GPUs from it, and the rule.
        """
        query = {"at": at, "preempted": preempted or None}
        return self.call("GET", _job(job, "why"), m.Why, query=query)

    def profile(self, job: JobId) -> m.Profile:
        """The job's speed by share, and the work left."""
        return self.call("GET", _job(job, "profile"), m.Profile)

    def checkpoint(self, job: JobId) -> m.Job:
        """Ask a live job to save its state at its next step."""
        return self.call("POST", _job(job, "checkpoint"), m.Job)

    def cancel(self, job: JobId, *, grace_s: float | None = None) -> m.Job:
        return self.call("POST", _job(job, "cancel"), m.Job, body=m.Cancel(grace_s=grace_s))

    def pause(self, job: JobId) -> m.Job:
        return self.call("POST", _job(job, "pause"), m.Job)

    def resume(self, job: JobId) -> m.Job:
        return self.call("POST", _job(job, "resume"), m.Job)

    def scale(
        self, job: JobId, *, min: int | None = None, max: int | None = None, pin: int | None = None
    ) -> m.Job:
        """Change a job's range of GPUs; `pin` sets both ends."""
        body = made(m.Scale, min=min, max=max, pin=pin)
        return self.call("POST", _job(job, "scale"), m.Job, body=body)

    def wait(
        self,
        job: JobId,
        until: Callable[[m.Job], bool] = lambda job: job.state.is_final,
        *,
        timeout_s: float | None = None,
    ) -> m.Job:
        """Wait, without polling, until the condition holds or the job ends. Raises `TimedOut` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        cursor = self.status().last_event
        now = self.job(job)
        if until(now) or now.state.is_final:
            return now
        for event in self.watch_events(job=now.id, cursor=cursor, deadline=deadline):
            if event.job == now.id:
                now = self.job(now.id)
                if until(now) or now.state.is_final:
                    return now
        raise TimedOut(f"{now.name} is still {now.state.value} after {timeout_s:g} s")

    # logs and events

    def logs(
        self,
        job: JobId,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        since: datetime | None = None,
        tail: int | None = None,
    ) -> list[m.LogLine]:
        """The lines of all workers, merged by time; with `tail`, only the last ones."""
        query = {"rank": rank, "attempt": attempt, "since": since, "tail": tail}
        found = self.pages(_job(job, "logs"), m.LogPage, query)
        return found if tail is None else found[len(found) - tail if tail < len(found) else 0 :]

    def follow_logs(
        self,
        job: JobId,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        since: datetime | None = None,
        tail: int | None = None,
    ) -> Iterator[m.LogLine]:
        """Lines as they are written, until the job ends; continues over resizes, restarts and lost connections."""
        query = {"rank": rank, "attempt": attempt, "since": since, "tail": tail}
        for message in self.stream(_job(job, "logs/stream"), query):
            if message.event == "end":
                return
            if message.event == "line":
                yield parsed(m.LogLine, message.data)

    def events(
        self,
        *,
        job: JobId | None = None,
        user: str | None = None,
        type: str | None = None,
        since: datetime | None = None,
        tail: int | None = None,
    ) -> list[m.Event]:
        """Events, oldest first. `type` is a prefix: `job.`, `worker.`, `policy.changed`."""
        query = {"job": job, "user": user, "type": type, "since": since, "tail": tail}
        return self.pages("events", m.EventList, query, empty_ends=True)

    def watch_events(
        self,
        *,
        job: JobId | None = None,
        user: str | None = None,
        type: str | None = None,
        since: datetime | None = None,
        tail: int | None = None,
        cursor: int | None = None,
        deadline: float | None = None,
    ) -> Iterator[m.Event]:
        """Events as they happen, without end; a lost connection is opened again.

        `cursor` is the id of the last event to skip. The iterator ends at `deadline`, a `time.monotonic` value.
        """
        query = {"job": job, "user": user, "type": type, "since": since, "tail": tail}
        start = None if cursor is None else str(cursor)
        for message in self.stream("events/stream", query, cursor=start, deadline=deadline):
            yield parsed(m.Event, message.data)

    # the cluster

    def healthy(self) -> bool:
        """Whether the server answers."""
        try:
            return self.request("GET", f"{self.address}/healthz", timeout=2.0).status_code == 200
        except ClientError:
            return False

    def status(self) -> m.Status:
        return self.call("GET", "status", m.Status)

    def doctor(self) -> m.Doctor:
        return self.call("GET", "doctor", m.Doctor)

    def shares(self, *, since: datetime | None = None) -> m.ShareList:
        """The fairness ledger since its last sample before `since`, or since its beginning."""
        return self.call("GET", "shares", m.ShareList, query={"since": since})

    def policy(self) -> m.Policy:
        return self.call("GET", "policy", m.Policy)

    def set_policy(self, name: str, options: Mapping[str, str] | None = None) -> m.Policy:
        """Change the policy of the running cluster."""
        body = made(m.PolicySet, name=name, options=dict(options or {}))
        return self.call("PUT", "policy", m.Policy, body=body)

    def shutdown(self, *, keep_jobs: bool = False) -> None:
        """Stop the server, and its jobs unless `keep_jobs`: those train on, and the next server adopts them."""
        self.request("POST", "shutdown", json={"jobs": "keep" if keep_jobs else "stop"})

    # nodes

    def nodes(self) -> list[m.NodeStatus]:
        return self.pages("nodes", m.NodeList, {})

    def node(self, name: str) -> m.Node:
        return self.call("GET", f"nodes/{segment(name)}", m.Node)

    def drain(self, name: str) -> m.Node:
        """Stop using a node: its jobs move to other nodes, or wait."""
        return self.call("POST", f"nodes/{segment(name)}/drain", m.Node)

    def uncordon(self, name: str) -> m.Node:
        return self.call("POST", f"nodes/{segment(name)}/uncordon", m.Node)

    # users and tokens

    def users(self) -> list[m.User]:
        return self.pages("users", m.UserList, {})

    def user(self, name: str) -> m.User:
        return self.call("GET", f"users/{segment(name)}", m.User)

    def create_user(self, name: str, *, role: str = "user", tickets: float = 1.0) -> m.User:
        body = made(m.UserCreate, name=name, role=role, tickets=tickets)
        return self.call("POST", "users", m.User, body=body)

    def change_user(self, name: str, *, role: str | None = None, tickets: float | None = None) -> m.User:
        body = made(m.UserChange, role=role, tickets=tickets)
        return self.call("PATCH", f"users/{segment(name)}", m.User, body=body)

    def delete_user(self, name: str) -> None:
        self.request("DELETE", f"users/{segment(name)}")

    def tokens(self) -> list[m.Token]:
        return self.pages("tokens", m.TokenList, {})

    def create_token(
        self, *, user: str | None = None, label: str = "", expires_in_s: float | None = None
    ) -> m.TokenCreated:
        """Create a token. Only this answer contains its text."""
        body = made(m.TokenCreate, user=user, label=label, expires_in_s=expires_in_s)
        return self.call("POST", "tokens", m.TokenCreated, body=body)

    def delete_token(self, token_id: int) -> None:
        self.request("DELETE", f"tokens/{int(token_id)}")


def _job(job: JobId, what: str = "") -> str:
    return f"jobs/{segment(str(job))}" + (f"/{what}" if what else "")
