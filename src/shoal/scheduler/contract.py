"""Check every decision, also those of third-party policies. A violation raises an error that names the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shoal.core.decision import Decision
from shoal.core.errors import ShoalError
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.base import Policy


def checked(policy: Policy, decision: Decision, view: View, supply: Supply, now_s: float) -> Decision:
    """The decision with shares as integers. Raises if it exceeds the supply or what a job can use."""
    shares = decision.gpus
    if not isinstance(shares, np.ndarray) or shares.shape != (view.n,) or shares.dtype.kind not in "iu":
        raise _mistake(policy, f"must return an array of {view.n} whole numbers, a share per job")
    if shares.dtype != np.int32:
        decision = replace(decision, gpus=shares.astype(np.int32))
    given, beyond = view.sum_and_first_beyond(decision.gpus)
    if beyond >= 0:
        least, most = view.min_gpus[beyond], view.max_gpus[beyond]
        raise _mistake(
            policy,
            f"gave {shares[beyond]} GPUs to a job that takes none or {least} to {most}",
        )
    if given > supply.total_gpus:
        raise _mistake(policy, f"gave away {given} GPUs of {supply.total_gpus}")
    if not decision.wake_s > now_s:
        raise _mistake(policy, f"asks at {now_s} s to decide again at {decision.wake_s} s, which is no later")
    return decision


def _mistake(policy: Policy, what: str) -> ShoalError:
    return ShoalError(f"policy {policy.name!r} {what}: a mistake in the policy")
