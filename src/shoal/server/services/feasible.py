"""Whether a cluster could ever run a job."""

from __future__ import annotations

from shoal.core.cluster import Cluster
from shoal.core.errors import did_you_mean
from shoal.core.job import GpuRange
from shoal.server.api.models import JobSpec
from shoal.server.services.engine_view import EngineView
from shoal.server.services.errors import Infeasible


def most_gpus(spec: JobSpec, cluster: Cluster, engine: EngineView) -> int:
    """GPUs of one type that the whole cluster has for such a job, or would have with all machines of its engine."""
    types = cluster.gpu_types
    for word in spec.gpu_types:
        if word not in types and not engine.most_gpus(word):
            raise Infeasible(f"no node has GPUs of type {word!r}; {did_you_mean(word, types)}")
    here = [int(cluster.gpus_of_type[cluster.type_index(t)]) for t in spec.gpu_types or types if t in types]
    later = [engine.most_gpus(t) for t in spec.gpu_types or (None,)]
    return max([*here, *later])


def feasible_range(spec: JobSpec, cluster: Cluster, engine: EngineView) -> GpuRange:
    """The job's range of GPUs; Infeasible if even the empty cluster could not hold its minimum."""
    gpus, most = spec.range, most_gpus(spec, cluster, engine)
    if gpus.min > most:
        raise Infeasible(
            f"it needs {gpus.min} GPUs of one type and this cluster has {most}; ask for {most} at most"
        )
    return gpus
