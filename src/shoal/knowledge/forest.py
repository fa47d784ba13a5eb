"""A random forest as plain arrays: scikit-learn trains it, and this module saves, loads and evaluates it.

Liquid's parameters: 70 trees, depth 13, at least 10 samples to split and 5 in a leaf. The paper's comparison
considers all features in each split, the authors' service all but one.

Saved models are lists of numbers that are checked on loading: unlike a pickle, such a file cannot run code.
The results equal scikit-learn's bit for bit: features are rounded to 32-bit floats, a sample goes left if
its value is at most the threshold, and trees are summed in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

TREES = 70
MAX_DEPTH = 13
MIN_SAMPLES_SPLIT = 10
MIN_SAMPLES_LEAF = 5

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """All trees, concatenated. Node i splits on `feature[i]` at `threshold[i]`; a leaf has feature -1."""

    features: int
    roots: Ints
    feature: Ints
    threshold: Floats
    left: Ints
    right: Ints
    value: Floats

    def predict(self, samples: Floats) -> Floats:
        """The mean prediction of the trees for each sample (one per row)."""
        rounded = np.ascontiguousarray(samples, dtype=np.float32)
        rows = np.arange(len(rounded))[:, None]
        node = np.broadcast_to(self.roots, (len(rounded), len(self.roots))).copy()
        while True:
            split = self.feature[node]
            inner = split >= 0
            if not inner.any():
                break
            goes_left = rounded[rows, np.where(inner, split, 0)] <= self.threshold[node]
            node = np.where(inner, np.where(goes_left, self.left[node], self.right[node]), node)
        leaves = self.value[node]
        total = np.zeros(len(rounded))
        for tree in range(leaves.shape[1]):  # in order: floating-point sums depend on it
            total += leaves[:, tree]
        return np.asarray(total / leaves.shape[1])

    def to_dict(self) -> dict[str, Any]:
        return {
            "features": self.features,
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
        }


_ARRAYS = ("roots", "feature", "threshold", "left", "right", "value")


def train_forest(samples: Floats, targets: Floats, *, seed: int, max_features: int | None = None) -> Forest:
    """Train with Liquid's parameters; `max_features=None` considers all features in each split."""
    from sklearn.ensemble import RandomForestRegressor  # slow to import, and only training needs it

    regressor = RandomForestRegressor(
        n_estimators=TREES,
        max_depth=MAX_DEPTH,
        min_samples_split=MIN_SAMPLES_SPLIT,
        min_samples_leaf=MIN_SAMPLES_LEAF,
        max_features=1.0 if max_features is None else max_features,
        random_state=seed,
    )
    regressor.fit(np.asarray(samples, dtype=np.float32), targets)
    return join_trees([estimator.tree_ for estimator in regressor.estimators_], samples.shape[1])


def join_trees(trees: Sequence[Any], features: int) -> Forest:
    """Concatenate scikit-learn's trees."""
    sizes = np.array([tree.node_count for tree in trees])
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    leaf = np.concatenate([tree.children_left for tree in trees]) < 0
    offsets = np.repeat(roots, sizes)

    def joined(name: str) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(getattr(tree, name)) for tree in trees])

    return Forest(
        features=features,
        roots=roots,
        feature=np.where(leaf, -1, joined("feature")).astype(np.int32),
        threshold=np.where(leaf, 0.0, joined("threshold")).astype(np.float64),
        left=np.where(leaf, -1, joined("children_left") + offsets).astype(np.int32),
        right=np.where(leaf, -1, joined("children_right") + offsets).astype(np.int32),
        value=joined("value").reshape(-1).astype(np.float64),
    )


def forest_from_dict(state: dict[str, Any]) -> Forest | Unknown:
    """A forest from saved values, after checks.

    Children come after their parent and are in range (so that evaluation ends), features exist, and numbers
    are finite.
    """
    try:
        loaded = Forest(
            features=int(state["features"]),
            roots=np.asarray(state["roots"], dtype=np.int32),
            feature=np.asarray(state["feature"], dtype=np.int32),
            threshold=np.asarray(state["threshold"], dtype=np.float64),
            left=np.asarray(state["left"], dtype=np.int32),
            right=np.asarray(state["right"], dtype=np.int32),
            value=np.asarray(state["value"], dtype=np.float64),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return Unknown(f"the saved forest cannot be read: {type(error).__name__} {error}")
    trouble = _not_a_forest(loaded)
    return loaded if trouble is None else Unknown(f"the saved forest {trouble}")


def _not_a_forest(forest: Forest) -> str | None:
    nodes = len(forest.feature)
    if any(getattr(forest, name).ndim != 1 for name in _ARRAYS):
        return "has arrays that are not flat lists"
    if nodes == 0 or any(len(getattr(forest, name)) != nodes for name in _ARRAYS if name != "roots"):
        return "has arrays of different lengths"
    inner = np.flatnonzero(forest.feature >= 0)
    for side in (forest.left[inner], forest.right[inner]):
        if bool(np.any((side <= inner) | (side >= nodes))):
            return "has a child that does not come after its parent"
    if bool(np.any(forest.feature >= forest.features)):
        return "splits on a feature that it does not have"
    if len(forest.roots) == 0 or bool(np.any((forest.roots < 0) | (forest.roots >= nodes))):
        return "has no root, or one out of range"
    if not bool(np.isfinite(forest.threshold).all() and np.isfinite(forest.value).all()):
        return "holds numbers that are not finite"
    return None
