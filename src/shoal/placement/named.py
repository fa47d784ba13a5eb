"""The placements that can be asked for by name, each with its options."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from shoal.core.errors import ShoalError, did_you_mean
from shoal.placement.base import Placer, PoolPlacer
from shoal.placement.best_fit import BestFit
from shoal.placement.deal import DealEqually
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.liquid_placer import LiquidPlacer
from shoal.placement.liquid_score import LAMBDA
from shoal.placement.migrate import MoveRule, MovingPlacer
from shoal.placement.registry import Setting
from shoal.policies.base import NoOptions


def _nodes_or_refuse(setting: Setting, name: str) -> None:
    if setting.cluster.pooled:
        raise ShoalError(
            f"placement {name!r} needs nodes, and this cluster is one pool: describe it with --cluster FILE"
        )


class Auto:
    name = "auto"
    summary = "pool without nodes, keep-and-pack with them"
    Options = NoOptions

    @staticmethod
    def make(setting: Setting, options: NoOptions) -> Placer:
        if setting.cluster.pooled:
            return PoolPlacer()
        return KeepAndPack(all_or_nothing=not setting.elastic)


class Pool:
    name = "pool"
    summary = "anywhere: nodes do not matter, nothing is ever fragmented"
    Options = NoOptions

    @staticmethod
    def make(setting: Setting, options: NoOptions) -> Placer:
        return PoolPlacer()


class Packed:
    name = "keep-and-pack"
    summary = "who runs stays; who comes takes the node with least to spare, or as few as possible"
    Options = NoOptions

    @staticmethod
    def make(setting: Setting, options: NoOptions) -> Placer:
        _nodes_or_refuse(setting, Packed.name)
        return KeepAndPack(all_or_nothing=not setting.elastic)


class NodeOrWholeNodes:
    name = "node-or-whole-nodes"
    summary = "keep-and-pack, but a share stays within one node or takes whole nodes (CoDDL)"
    Options = NoOptions

    @staticmethod
    def make(setting: Setting, options: NoOptions) -> Placer:
        _nodes_or_refuse(setting, NodeOrWholeNodes.name)
        return KeepAndPack(whole_nodes=True, all_or_nothing=not setting.elastic)


@dataclass(frozen=True)
class MovingOptions:
    #: Seconds that a move costs the job; nan: what the run's cost model says.
    move_s: float = nan
    #: Gains count no further ahead.
    horizon_s: float = 1800.0
    #: Jobs that may move in one decision.
    max_moves: int = 4

    def __post_init__(self) -> None:
        if self.move_s < 0 or not self.horizon_s > 0 or self.max_moves < 1:
            raise ShoalError(
                "placement 'moving': move_s must be 0 or more, horizon_s above 0 and max_moves 1 or more"
            )


class Moving:
    name = "moving"
    summary = "keep-and-pack, and jobs move where their gain in speed pays within a horizon"
    Options = MovingOptions

    @staticmethod
    def make(setting: Setting, options: MovingOptions) -> Placer:
        _nodes_or_refuse(setting, Moving.name)
        move_s = setting.move_s if np.isnan(options.move_s) else options.move_s
        rule = MoveRule(move_s, options.horizon_s, options.max_moves)
        return MovingPlacer(KeepAndPack(all_or_nothing=not setting.elastic), setting.speed, rule)


class Optimus:
    name = "optimus"
    summary = "the fewest nodes that hold a job in equal parts (EuroSys'18)"
    Options = NoOptions

    @staticmethod
    def make(setting: Setting, options: NoOptions) -> Placer:
        _nodes_or_refuse(setting, Optimus.name)
        return DealEqually(all_or_nothing=not setting.elastic)


@dataclass(frozen=True)
class LiquidOptions:
    #: Which reading of the algorithm: remove-full, remove-always, authors-code.
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


class Liquid:
    name = "liquid"
    summary = "best fit: each worker where network cost and filled nodes score best (TPDS'21)"
    Options = LiquidOptions

    @staticmethod
    def make(setting: Setting, options: LiquidOptions) -> Placer:
        _nodes_or_refuse(setting, Liquid.name)
        return LiquidPlacer(
            variant=BestFit(options.variant), lam=options.lam, all_or_nothing=not setting.elastic
        )
