"""What people do to jobs, users and policies. Each is written down first, and only then done."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.events import Held, NodeBack, NodeLost, Rescaled, Submitted, TicketsChanged
from shoal.core.job import GpuRange
from shoal.core.options import make_options
from shoal.knowledge.auto_gpus import AutoGpus
from shoal.knowledge.size_search import Autoscale
from shoal.policies.registry import policy_class
from shoal.server.api.models import JobSpec, JobState, Resize, Role, Scale
from shoal.server.home import write_atomically
from shoal.server.loop.conductor import Conductor
from shoal.server.loop.lifecycle import Life, Verb, apply
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.naming import hash_of, model_word, short_name
from shoal.server.store.store import Store

MAX_ACTIVE_JOBS_OF_USER = 10_000


class Infeasible(ShoalError):
    """No placement of this job exists on this cluster, whatever the others do."""


class Conflict(ShoalError):
    """It cannot be done as things are."""


class Verbs:
    def __init__(self, conductor: Conductor) -> None:
        self.c = conductor
        self.store: Store = conductor.store

    # -- jobs --------------------------------------------------------------------------------------

    def submit(
        self,
        spec: JobSpec,
        user: str,
        *,
        key: str | None = None,
        size: AutoGpus | None = None,
        needs: dict[str, Any] | None = None,
    ) -> tuple[int, bool]:
        """(id, whether it is new). With a key, the same submission again gives the same job.

        `size` is what was chosen for a job that leaves its GPUs open, `needs` what is known of its use of one.
        """
        body_hash = hash_of(spec.model_dump_json())
        if key is not None and (before := self.store.idempotent(user, key)) is not None:
            if before["body_hash"] != body_hash:
                raise Conflict("this idempotency key was used for another job; use a new one")
            return before["job"], False
        if size is not None:
            spec = spec.model_copy(update={"gpus": str(size.gpus)})
        gpus = self.check_feasible(spec)
        if spec.autoscale:
            Autoscale.parse(spec.autoscale)
        if sum(j.user == user for j in self.c.jobs.values()) >= MAX_ACTIVE_JOBS_OF_USER:
            raise Conflict(f"you have {MAX_ACTIVE_JOBS_OF_USER} unfinished jobs, which is the limit")
        name = spec.name
        if name is not None and any(j.name == name and j.user == user for j in self.c.jobs.values()):
            raise Conflict(f"you have an unfinished job called {name!r} already; choose another name")
        job = self._record(spec, gpus, user, key, body_hash, size, needs)
        self.c.jobs[job.id] = job
        core, profile = self.c.profiles.of(job)
        self.c.post(Submitted(job.id, core, profile), *self.c.searches.told(job))
        return job.id, True

    def _record(
        self,
        spec: JobSpec,
        gpus: GpuRange,
        user: str,
        key: str | None,
        body_hash: str,
        size: AutoGpus | None = None,
        needs: dict[str, Any] | None = None,
    ) -> LiveJob:
        now_s = self.c.now_s()
        kept = spec.model_dump(mode="json", exclude={"secrets"}) | {"secrets": sorted(spec.secrets)}
        resize = spec.effective_resize
        largest = max(self._largest_by_type(spec).values())
        row = {
            "name": spec.name or "",
            "user": user,
            "state": JobState.PENDING.value,
            "spec": kept,
            "given": sorted(spec.model_fields_set),
            "min_gpus": gpus.min,
            "max_gpus": gpus.max,
            "requested_gpus": spec.requested_gpus or max(min(gpus.max, largest), gpus.min),
            "resize": resize.value,
            "model": spec.model or model_word(spec.command),
            "progress": {"needs": needs},
            "submitted_s": now_s,
            "settled_s": now_s,
        }
        directory: Path | None = None
        try:
            with self.store.change(now_s, actor=user) as change:
                job_id = change.add_job(**row)
                if not row["name"]:
                    row["name"] = f"{short_name(spec.command)}-{job_id}"
                    change.update_job(job_id, name=row["name"])
                directory = self.c.home.job(job_id)
                self._make_directory(directory, spec.secrets)
                if key is not None:
                    change.add_idempotency(user, key, body_hash, job_id)
                wanted = f"{gpus} {'GPU' if gpus.max == 1 else 'GPUs'}"
                change.event(
                    "job.submitted", f"submitted {row['name']} with {wanted}", job=job_id, user=user,
                    data={"name": row["name"], "gpus": str(gpus), "resize": resize.value},
                )  # fmt: skip
                if size is not None:
                    change.event(
                        "job.sized", f"GPUs: {size.why}", job=job_id, user=user,
                        data={"gpus": str(gpus), "known": size.known},
                    )  # fmt: skip
        except BaseException:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        return LiveJob(
            id=job_id,
            name=row["name"],
            user=user,
            spec=kept,
            given=row["given"],
            min_gpus=row["min_gpus"],
            max_gpus=row["max_gpus"],
            requested_gpus=row["requested_gpus"],
            resize=resize,
            model=row["model"],
            life=Life.begin(now_s),
            needs=needs,
        )

    def _make_directory(self, directory: Path, given: dict[str, str]) -> None:
        try:
            directory.mkdir(mode=0o700)
            if given:
                write_atomically(directory / "secrets.json", json.dumps(given))
        except OSError as error:
            from shoal.server.store.store import StoreFull

            raise StoreFull(f"cannot make {directory}: {error.strerror}; nothing was changed") from None

    def _largest_by_type(self, spec: JobSpec) -> dict[str, int]:
        cluster = self.c.cluster
        types = cluster.gpu_types
        for word in spec.gpu_types:
            if word not in types:
                raise Infeasible(f"no node has GPUs of type {word!r}; {did_you_mean(word, types)}")
        allowed = spec.gpu_types or list(types)
        return {t: int(cluster.gpus_of_type[cluster.type_index(t)]) for t in allowed}

    def most_gpus(self, spec: JobSpec) -> int:
        """GPUs of one type that the whole cluster has for such a job."""
        return max(self._largest_by_type(spec).values())

    def check_feasible(self, spec: JobSpec) -> GpuRange:
        """Its range; Infeasible if even the empty cluster could not hold its min."""
        gpus, largest = spec.range, max(self._largest_by_type(spec).values())
        if gpus.min > largest:
            raise Infeasible(
                f"it needs {gpus.min} GPUs of one type and this cluster has {largest}; ask for {largest} at most"
            )
        return gpus

    def cancel(self, job: LiveJob, actor: str, grace_s: float | None = None) -> None:
        if job.life.state is not JobState.STOPPING:
            self._change(job, Verb.CANCEL, actor)
            self.c.withdraw(job)
            self.c.crews[job.resize].cancel(job)
            self.c._flush()
        if grace_s is not None:
            for worker in list(job.workers):
                asyncio.get_running_loop().call_later(grace_s, self._kill, worker)

    def _kill(self, worker: str) -> None:
        self.c.executor.stop(worker, kill=True)

    def pause(self, job: LiveJob, actor: str) -> None:
        if job.life.state is JobState.PAUSED:
            return
        self._change(job, Verb.HOLD, actor)
        self.c.post(Held(job.id, True))

    def resume(self, job: LiveJob, actor: str) -> None:
        if job.life.state is not JobState.PAUSED:
            raise Conflict(f"it is {job.life.state.value}, not paused")
        self._change(job, Verb.RELEASE, actor)
        self.c.post(Held(job.id, False))
        self.c.soon(job)  # as a guest it may go on where it was

    def _change(self, job: LiveJob, verb: Verb, actor: str) -> None:
        message = {Verb.HOLD: "paused", Verb.RELEASE: "resumed", Verb.CANCEL: "cancelled"}[verb]
        life = apply(job.life, verb, self.c.now_s(), f"{message} by {actor}")
        row = {"state": life.state.value, "message": life.message, "settled_s": life.settled_s}
        row |= {"waiting_s": life.waiting_s, "running_s": life.running_s, "paused_s": life.paused_s}
        row |= {"gpu_s": life.gpu_s}
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.update_job(job.id, **row)
            change.event(verb.value, f"{message} by {actor}", job=job.id, user=job.user)
        job.life = life

    def scale(self, job: LiveJob, scale: Scale, actor: str) -> None:
        if job.life.state is JobState.STOPPING:
            raise Conflict("it is being cancelled")
        low = scale.pin or scale.min or job.min_gpus
        high = scale.pin or scale.max or max(job.max_gpus, low)
        low = min(low, high) if scale.min is None else low
        gpus = GpuRange(low, high)
        if job.resize is Resize.NEVER and job.workers:
            raise Conflict("it cannot change size while it runs: submit it with resize `live` or `restart`")
        if job.resize is Resize.NEVER and gpus.min != gpus.max:
            raise Conflict("it has a fixed size; give pin, or submit it with resize `live` or `restart`")
        spec = JobSpec.model_validate(
            {"command": ["x"], "gpus": str(gpus), "resize": "live", "gpu_types": job.spec["gpu_types"]}
        )
        self.check_feasible(spec)
        before = GpuRange(job.min_gpus, job.max_gpus)
        # As at submission: what its owner asked for, as far as the range and the cluster allow.
        wish = job.spec["requested_gpus"] or self.most_gpus(spec)
        requested = min(max(wish, gpus.min), gpus.max)
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.update_job(job.id, min_gpus=gpus.min, max_gpus=gpus.max, requested_gpus=requested)
            change.event(
                "job.scaled", f"range changed from {before} to {gpus} by {actor}", job=job.id, user=job.user,
                data={"from": str(before), "to": str(gpus)},
            )  # fmt: skip
        job.min_gpus, job.max_gpus, job.requested_gpus = gpus.min, gpus.max, requested
        # Also for one the scheduler has yet to hear of: that news is before this in the inbox.
        profile = self.c.profiles.profile(job)
        capped = self.c.searches.rescaled(job)
        self.c.post(Rescaled(job.id, gpus.min, gpus.max, requested, profile), *capped)

    # -- users, tokens, policy ---------------------------------------------------------------------

    def add_user(self, name: str, role: Role, tickets: float, actor: str) -> None:
        if self.store.user(name) is not None:
            raise Conflict(f"there is a user {name!r} already")
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.add_user(name, role.value, tickets)
            change.event("user.created", f"{name} ({role.value}) with {tickets:g} tickets")
        self.c.post(TicketsChanged(name, tickets))

    def change_user(self, name: str, role: Role | None, tickets: float | None, actor: str) -> None:
        row = self.store.user(name)
        assert row is not None
        if row["role"] == Role.ADMIN.value and role not in (None, Role.ADMIN):
            self._keep_an_admin(name)
        changes = {"role": role.value if role else row["role"], "tickets": tickets or row["tickets"]}
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.update_user(name, **changes)
            change.event(
                "user.changed",
                f"{name} is {changes['role']} with {changes['tickets']:g} tickets",
                data=changes,
            )
        if tickets is not None:
            self.c.post(TicketsChanged(name, tickets))

    def delete_user(self, name: str, actor: str) -> None:
        row = self.store.user(name)
        if row is not None and row["role"] == Role.ADMIN.value:
            self._keep_an_admin(name)
        if any(j.user == name for j in self.c.jobs.values()):
            raise Conflict(f"{name} has unfinished jobs; cancel them first")
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.delete_user(name)
            change.event("user.deleted", f"{name} and their tokens are gone")

    def _keep_an_admin(self, name: str) -> None:
        if not any(u["role"] == Role.ADMIN.value and u["name"] != name for u in self.store.users()):
            raise Conflict(f"{name} is the only admin; make another one first")

    def add_token(self, user: str, label: str, expires_in_s: float | None, actor: str) -> tuple[int, str]:
        """(id, the token): the only time that it is seen."""
        token = f"shoal_{secrets.token_urlsafe(32)}"
        now_s = self.c.now_s()
        expires_s = None if expires_in_s is None else now_s + expires_in_s
        with self.store.change(now_s, actor=actor) as change:
            token_id = change.add_token(user, hash_of(token), label, expires_s)
            change.event("token.created", f"token {token_id} for {user}", data={"token": token_id})
        return token_id, token

    def delete_token(self, token_id: int, actor: str) -> None:
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.delete_token(token_id)
            change.event("token.deleted", f"token {token_id} is no longer valid", data={"token": token_id})

    def drain(self, node: int, actor: str) -> None:
        if node not in self.c.drained:
            self._use_nodes({*self.c.drained, node}, "node.drained", node, actor)
            self.c.drained.add(node)
            self.c.post(NodeLost(node))

    def uncordon(self, node: int, actor: str) -> None:
        if node in self.c.drained:
            self._use_nodes(self.c.drained - {node}, "node.uncordoned", node, actor)
            self.c.drained.discard(node)
            self.c.post(NodeBack(node))

    def _use_nodes(self, drained: set[int], type: str, node: int, actor: str) -> None:
        name = self.c.nodes[node].name
        with self.store.change(self.c.now_s(), actor=actor) as change:
            change.put("drained", sorted(self.c.nodes[i].name for i in drained))
            change.event(type, f"{name} was {type.split('.')[1]} by {actor}", data={"node": name})

    def set_policy(self, name: str, options: dict[str, str], actor: str) -> None:
        make_options(policy_class(name), options)  # complains about either before anything is changed
        before = self.c.policy_name, self.c.policy_options
        self.c.use_policy(name, options)  # and this if it cannot decide on the jobs there are
        try:
            with self.store.change(self.c.now_s(), actor=actor) as change:
                change.put("policy", {"name": name, "options": options})
                data = {"policy": name, "before": before[0]}
                change.event("policy.changed", f"{before[0]} -> {name}", data=data)
        except ShoalError:
            self.c.use_policy(*before)
            raise
