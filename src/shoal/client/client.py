"""`Client`: one method per request of the API."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.client.connection import Connection, made, parsed, segment
from shoal.client.errors import ClientError, NotFound, TimedOut, job_rejected
from shoal.core.words import counted
from shoal.server.api import models as m

JobId = int | str
#: How long one part of an upload may take.
UPLOAD_S = 120.0


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
        if spec.upload and spec.tree is None:
            spec = spec.model_copy(update={"tree": self.upload(spec.workdir).digest})
        with job_rejected():
            return self.call("POST", "jobs", m.Job, body=spec, headers=headers)

    def upload(self, directory: str | Path) -> m.Workdir:
        """Upload a working directory, unless the server has it. The answer names its content."""
        from shoal.client.workdir import packed

        with packed(Path(directory), self.status().upload_limit_bytes) as archive:
            where = f"workdirs/{archive.digest}"
            try:
                return self.call("GET", where, m.Workdir)
            except NotFound:
                size = {"Content-Length": str(archive.size_bytes)}
                sent = self.request("PUT", where, content=archive.archive, headers=size, timeout=UPLOAD_S)
                return parsed(m.Workdir, sent.content)

    def submit_array(self, spec: m.JobSpec, *, idempotency_key: str | None = None) -> m.Array:
        """Submit all jobs of a spec with `array` or `sweep`: all of them, or none."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        with job_rejected():
            return self.call("POST", "arrays", m.Array, body=spec, headers=headers)

    def array(self, array: JobId) -> m.Array:
        return self.call("GET", f"arrays/{segment(str(array))}", m.Array)

    def change_array(self, array: JobId, verb: str, *, grace_s: float | None = None) -> m.Array:
        """`cancel`, `pause` or `resume` all its unfinished jobs."""
        body = m.Cancel(grace_s=grace_s) if verb == "cancel" else None
        return self.call("POST", f"arrays/{segment(str(array))}/{verb}", m.Array, body=body)

    def plan(self, spec: m.JobSpec) -> m.PlanOutcome:
        """What would happen if this job were submitted now. Changes nothing."""
        with job_rejected():
            return self.call("POST", "plan", m.PlanOutcome, body=m.PlanRequest(spec=spec))

    def jobs(
        self,
        *,
        states: list[str] | None = None,
        active: bool | None = None,
        user: str | None = None,
        name: str | None = None,
        since: datetime | None = None,
        labels: Mapping[str, str] | None = None,
        array: JobId | None = None,
        limit: int | None = None,
    ) -> list[m.Job]:
        """The jobs that you may see, newest first, at most `limit`."""
        query = {
            "state": ",".join(states) if states else None,
            "active": active,
            "user": user,
            "name": name,
            "since": since,
            "label": [f"{key}={value}" for key, value in (labels or {}).items()] or None,
            "array": array,
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

    def wait_array(self, array: JobId, *, timeout_s: float | None = None) -> m.Array:
        """Wait, without polling, until all jobs of the array are over. Raises `TimedOut` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        cursor = self.status().last_event
        now = self.array(array)
        if not now.unfinished:
            return now
        ends = {f"job.{state.value}" for state in m.JobState if state.is_final}
        ended: set[int] = set()  # since the array was read, which costs the server a look at all its jobs
        for event in self.watch_events(user=now.user, type="job.", cursor=cursor, deadline=deadline):
            if event.type in ends and event.job is not None and now.first <= event.job <= now.last:
                ended.add(event.job)
                if len(ended) >= now.unfinished:
                    now = self.array(now.id)
                    ended.clear()
                    if not now.unfinished:
                        return now
        now = self.array(now.id)
        if not now.unfinished:
            return now
        left = "is" if now.unfinished == 1 else "are"
        raise TimedOut(
            f"{counted(now.unfinished, 'job')} of {now.name} {left} not over after {timeout_s:g} s"
        )

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

    def exec_start(
        self,
        job: JobId,
        command: Sequence[str],
        *,
        rank: int | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> str:
        """Run a command next to a worker; return the name of the session."""
        body = made(m.ExecStart, command=list(command), rank=rank, tty=tty, rows=rows, columns=columns)
        return self.call("POST", _job(job, "exec"), m.ExecStarted, body=body).id

    def exec_output(self, session: str, after: int = 0) -> tuple[bytes, int, int | None]:
        """(what was printed since, the position after it, the exit code once all was read). Waits for more."""
        path = f"sessions/{segment(session)}/output"
        found = self.call("GET", path, m.ExecOutput, query={"after": after})
        return base64.b64decode(found.data), found.next, found.exit_code

    def exec_input(self, session: str, data: bytes) -> None:
        body = made(m.ExecInput, data=base64.b64encode(data).decode())
        self.request("POST", f"sessions/{segment(session)}/input", json=body.model_dump())

    def exec_size(self, session: str, rows: int, columns: int) -> None:
        body = made(m.ExecSize, rows=rows, columns=columns)
        self.request("POST", f"sessions/{segment(session)}/size", json=body.model_dump())

    def exec_end(self, session: str) -> None:
        self.request("DELETE", f"sessions/{segment(session)}")

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
            self.find_server()  # the address may be another one after it
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
        return self.node_list().items

    def node_list(self) -> m.NodeList:
        """All nodes and, for an admin, the agents that were refused lately."""
        return self.call("GET", "nodes", m.NodeList)

    def node(self, name: str) -> m.Node:
        return self.call("GET", f"nodes/{segment(name)}", m.Node)

    def drain(self, name: str) -> m.Node:
        """Stop using a node: its jobs move to other nodes, or wait."""
        return self.call("POST", f"nodes/{segment(name)}/drain", m.Node)

    def uncordon(self, name: str) -> m.Node:
        return self.call("POST", f"nodes/{segment(name)}/uncordon", m.Node)

    def remove_node(self, name: str) -> None:
        """Forget a node that is lost."""
        self.request("DELETE", f"nodes/{segment(name)}")

    def join_tokens(self) -> list[m.JoinToken]:
        return self.pages("join-tokens", m.JoinTokenList, {})

    def create_join_token(self, *, expires_in_s: float = 3600.0) -> m.JoinTokenCreated:
        """Make a token with which one agent can join. Only this answer contains its text."""
        body = made(m.JoinTokenCreate, expires_in_s=expires_in_s)
        return self.call("POST", "join-tokens", m.JoinTokenCreated, body=body)

    def remove_join_token(self, token_id: str) -> None:
        self.request("DELETE", f"join-tokens/{segment(token_id)}")

    # users and tokens

    def users(self) -> list[m.User]:
        return self.pages("users", m.UserList, {})

    def user(self, name: str) -> m.User:
        return self.call("GET", f"users/{segment(name)}", m.User)

    def create_user(
        self,
        name: str,
        *,
        role: str = "user",
        tickets: float = 1.0,
        same_person: bool = False,
        group: str | None = None,
        limits: Mapping[str, Any] | None = None,
        account: str | None = None,
        same_account: bool = False,
    ) -> m.User:
        body = made(
            m.UserCreate, account=account, same_account=same_account,
            name=name, role=role, tickets=tickets, same_person=same_person, group=group,
            limits=dict(limits or {}),
        )  # fmt: skip
        return self.call("POST", "users", m.User, body=body)

    def change_user(
        self,
        name: str,
        *,
        role: str | None = None,
        tickets: float | None = None,
        group: str | None = None,
        limits: Mapping[str, Any] | None = None,
        account: str | None = None,
    ) -> m.User:
        """What is left out stays. A limit of None is removed, and an empty group is none."""
        body = made(m.UserChange, role=role, tickets=tickets, group=group, limits=limits, account=account)
        return self.call("PATCH", f"users/{segment(name)}", m.User, body=body)

    def groups(self) -> list[m.Group]:
        return self.pages("groups", m.GroupList, {})

    def group(self, name: str) -> m.Group:
        return self.call("GET", f"groups/{segment(name)}", m.Group)

    def create_group(
        self, name: str, *, tickets: float | None = None, limits: Mapping[str, Any] | None = None
    ) -> m.Group:
        body = made(m.GroupCreate, name=name, tickets=tickets, limits=dict(limits or {}))
        return self.call("POST", "groups", m.Group, body=body)

    def change_group(self, name: str, **change: Any) -> m.Group:
        """Change `tickets` or `limits`. What is left out stays; None removes it."""
        body = made(m.GroupChange, **change)
        if "tickets" in change:
            body = body.model_copy(update={"tickets": change["tickets"]})
        return self.call("PATCH", f"groups/{segment(name)}", m.Group, body=body)

    def delete_group(self, name: str) -> None:
        self.request("DELETE", f"groups/{segment(name)}")

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

    # notifications

    def webhooks(self) -> list[m.Webhook]:
        return self.pages("webhooks", m.WebhookList, {})

    def create_webhook(
        self, url: str, *, format: str = "json", events: list[str] | None = None
    ) -> m.WebhookCreated:
        """Be told of events of your jobs. Only this answer contains the key of the signatures."""
        body = made(m.WebhookCreate, url=url, format=format, events=events)
        return self.call("POST", "webhooks", m.WebhookCreated, body=body)

    def test_webhook(self, webhook: int) -> m.WebhookTest:
        """Send a notification now."""
        return self.call("POST", f"webhooks/{int(webhook)}/test", m.WebhookTest)

    def delete_webhook(self, webhook: int) -> None:
        self.request("DELETE", f"webhooks/{int(webhook)}")


def _job(job: JobId, what: str = "") -> str:
    return f"jobs/{segment(str(job))}" + (f"/{what}" if what else "")
