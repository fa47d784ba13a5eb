"""The new size of a job whose owner scales it, or why that is refused."""

from __future__ import annotations

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange
from shoal.server.api.models import JobSpec, JobState, Resize, Scale
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.engine_view import EngineView
from shoal.server.services.errors import Conflict
from shoal.server.services.feasible import feasible_range, most_gpus


def new_size(job: LiveJob, scale: Scale, cluster: Cluster, engine: EngineView) -> tuple[GpuRange, int]:
    """(range, requested GPUs) of the job after this change; raises if it is refused. Bounds that are left out stay."""
    if job.life.state is JobState.STOPPING:
        raise Conflict("it is being cancelled")
    gpus = _new_range(job, scale)
    if job.resize is Resize.NEVER and job.workers:
        raise Conflict("it cannot change size while it runs: submit it with resize `live` or `restart`")
    if job.resize is Resize.NEVER and gpus.min != gpus.max:
        raise Conflict("it has a fixed size; give pin, or submit it with resize `live` or `restart`")
    return gpus, _requested(job, gpus, cluster, engine)


def _new_range(job: LiveJob, scale: Scale) -> GpuRange:
    low = scale.pin or scale.min or job.min_gpus
    high = scale.pin or scale.max or max(job.max_gpus, low)
    try:
        return GpuRange(min(low, high) if scale.min is None else low, high, job.step_gpus)
    except ShoalError as error:
        raise Conflict(str(error)) from None


def _requested(job: LiveJob, gpus: GpuRange, cluster: Cluster, engine: EngineView) -> int:
    """As at submission: the owner's wish, within the range and the cluster."""
    spec = JobSpec.model_validate(
        {"command": ["x"], "gpus": str(gpus), "resize": "live", "gpu_types": job.spec["gpu_types"]}
    )
    feasible_range(spec, cluster, engine)
    wish = job.spec["requested_gpus"] or most_gpus(spec, cluster, engine)
    return gpus.floor(min(max(wish, gpus.min), gpus.max))
