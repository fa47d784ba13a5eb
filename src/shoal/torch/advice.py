"""What to do about errors of torch that name neither Shoal nor its alternative."""

from __future__ import annotations

_NO_OWN_GROUPS = (
    "in a Shoal job the workers form their process groups themselves: leave out init_process_group and "
    "DistributedDataParallel and call job.wrap(model, optimizer); to shard a model (FSDP2) call "
    "job.shard(model, optimizer), or give fully_shard the job's mesh: fully_shard(module, mesh=job.mesh())"
)

_ADVICE = {
    # init_process_group, and fully_shard without a mesh, which calls it
    "environment variable RANK expected": _NO_OWN_GROUPS,
    "environment variable WORLD_SIZE expected": _NO_OWN_GROUPS,
    "environment variable MASTER_ADDR expected": _NO_OWN_GROUPS,
    # DistributedDataParallel, and collectives of the script
    "Default process group has not been initialized": _NO_OWN_GROUPS,
}


def advice_for(error: BaseException) -> str | None:
    """What the author of the script should do, if torch's own error does not say it."""
    text = str(error)
    return next((advice for part, advice in _ADVICE.items() if part in text), None)
