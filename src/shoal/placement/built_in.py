"""The built-in placements with their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.options import NoOptions
from shoal.placement.best_fit import BestFit
from shoal.placement.grouping_ga import Search
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.liquid_batch import MAX_PLANS, LiquidBatchPlacer
from shoal.placement.liquid_placer import LiquidPlacer
from shoal.placement.liquid_score import LAMBDA
from shoal.placement.moving_placer import MoveRule, MovingPlacer
from shoal.placement.optimus_placer import OptimusPlacer
from shoal.placement.placer import Placer, PoolPlacer
from shoal.placement.registry import Setting


@dataclass(frozen=True)
class BuiltIn:
    """A built-in placement: its name, and the function that makes its placer."""

    name: str
    summary: str
    placer: Callable[[Setting, Any], Placer]
    Options: type[Any] = NoOptions
    needs_nodes: bool = True

    def make(self, setting: Setting, options: Any) -> Placer:
        if self.needs_nodes and setting.cluster.pooled:
            raise ShoalError(
                f"placement {self.name!r} needs nodes, and this cluster is one pool: "
                "describe it with --cluster FILE"
            )
        return self.placer(setting, options)


@dataclass(frozen=True)
class MovingOptions:
    #: Seconds that a move costs the job; nan takes the value of the cost model.
    move_s: float = nan
    #: Gains beyond this horizon do not count.
    horizon_s: float = 1800.0
    #: Maximum number of jobs that move in one decision.
    max_moves: int = 4

    def __post_init__(self) -> None:
        if self.move_s < 0 or not self.horizon_s > 0 or self.max_moves < 1:
            raise ShoalError(
                "placement 'moving': move_s must be 0 or more, horizon_s above 0 and max_moves 1 or more"
            )


@dataclass(frozen=True)
class LiquidOptions:
    #: Variant of the algorithm: remove-full, remove-always, authors-code.
    variant: str = BestFit.REMOVE_FULL.value
    #: Weight of the network cost against filled nodes, 0..1.
    lam: float = LAMBDA

    def __post_init__(self) -> None:
        known = [v.value for v in BestFit]
        if self.variant not in known:
            raise ShoalError(
                f"placement 'liquid' has no variant {self.variant!r}; {did_you_mean(self.variant, known)}"
            )
        if not 0 <= self.lam <= 1:
            raise ShoalError(f"placement 'liquid': lam must be from 0 to 1, not {self.lam:g}")


@dataclass(frozen=True)
class LiquidBatchOptions:
    #: Weight of the network cost against filled nodes, 0..1.
    lam: float = LAMBDA
    #: Maximum number of plans that one decision evaluates.
    max_plans: int = MAX_PLANS
    #: Seed of the search.
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ShoalError(f"placement 'liquid-batch': lam must be from 0 to 1, not {self.lam:g}")
        if self.max_plans < 0 or self.seed < 0:
            raise ShoalError("placement 'liquid-batch': max_plans and seed must be 0 or more")


def _pool(setting: Setting, options: NoOptions) -> Placer:
    return PoolPlacer()


def _packed(setting: Setting, options: NoOptions) -> Placer:
    return KeepAndPack(all_or_nothing=not setting.elastic)


def _whole_nodes(setting: Setting, options: NoOptions) -> Placer:
    return KeepAndPack(whole_nodes=True, all_or_nothing=not setting.elastic)


def _equal_parts(setting: Setting, options: NoOptions) -> Placer:
    return OptimusPlacer(all_or_nothing=not setting.elastic)


def _auto(setting: Setting, options: NoOptions) -> Placer:
    if setting.cluster.pooled:
        return _pool(setting, options)
    # Optimus has a placement rule of its own.
    return (_equal_parts if setting.policy == "optimus" else _packed)(setting, options)


def _moving(setting: Setting, options: MovingOptions) -> Placer:
    move_s = setting.move_s if isnan(options.move_s) else options.move_s
    rule = MoveRule(move_s, options.horizon_s, options.max_moves)
    return MovingPlacer(_packed(setting, NoOptions()), setting.speed, rule, setting.may_move)


def _liquid(setting: Setting, options: LiquidOptions) -> Placer:
    return LiquidPlacer(variant=BestFit(options.variant), lam=options.lam, all_or_nothing=not setting.elastic)


def _liquid_batch(setting: Setting, options: LiquidBatchOptions) -> Placer:
    search = Search(lam=options.lam, max_plans=options.max_plans)
    return LiquidBatchPlacer(search=search, seed=options.seed, all_or_nothing=not setting.elastic)


AUTO = BuiltIn(
    "auto",
    "pool if the cluster has no nodes; else keep-and-pack, or optimus for the policy of that name",
    _auto,
    needs_nodes=False,
)
POOL = BuiltIn("pool", "ignores nodes: every share fits, nothing is fragmented", _pool, needs_nodes=False)
KEEP_AND_PACK = BuiltIn(
    "keep-and-pack",
    "running jobs stay; a new job takes the node with the fewest free GPUs, or as few nodes as possible",
    _packed,
)
NODE_OR_WHOLE_NODES = BuiltIn(
    "node-or-whole-nodes",
    "keep-and-pack, but a share stays within one node or takes whole nodes (CoDDL)",
    _whole_nodes,
)
MOVING = BuiltIn(
    "moving",
    "keep-and-pack, and jobs move if the gain in speed pays within a horizon",
    _moving,
    MovingOptions,
)
OPTIMUS = BuiltIn("optimus", "the fewest nodes that hold the job in equal parts (EuroSys'18)", _equal_parts)
LIQUID = BuiltIn(
    "liquid",
    "best fit: each worker goes to the node with the best score of network cost and fill (TPDS'21)",
    _liquid,
    LiquidOptions,
)
LIQUID_BATCH = BuiltIn(
    "liquid-batch",
    "liquid, but jobs that start at one decision are placed together by a genetic algorithm",
    _liquid_batch,
    LiquidBatchOptions,
)
