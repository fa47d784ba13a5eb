"""The speed of a parameter-server job by the placement of its tasks.

`step_time_s` is the model of the DL2 simulator, by the author of Optimus. For a worker on node n, with P
servers and W workers in total, of which P_n and W_n are on n,

    inside  = intra / max(P_n, W_n)                                        to the servers on its node
    between = min(inter / (P - P_n), inter / (W - min W_m over nodes m with a server))   to the others
    step    = compute + 2 (size / P) / the slower of the two

The slowest worker determines the step. `layout` and `LAYOUT_TIME_S` are Liquid's measurements of one server
and two workers. No formula in the paper explains them: two workers on one node apart from the server (p:ww)
are by far the slowest. `slowdown` combines both into one factor for the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.plan import Placement
from shoal.placement.validate import amount, whole


@dataclass(frozen=True, slots=True)
class Traffic:
    """Compute time, size and bandwidths of one step of a model."""

    compute_s: float
    size_mb: float
    inter_mb_s: float  #: bandwidth between nodes
    intra_mb_s: float  #: bandwidth inside a node
    steps_per_epoch: int

    def __post_init__(self) -> None:
        amount("the seconds that a step computes", self.compute_s)
        amount("the size of a model in MB", self.size_mb)
        for name in ("inter_mb_s", "intra_mb_s"):
            amount(f"the bandwidth {name}", getattr(self, name), 1e-9)


#: Measured constants of the DL2 simulator.
TRAFFIC: Mapping[str, Traffic] = {
    "resnet-50": Traffic(0.449, 102.2, 91.875, 306.5, 115),
    "vgg-16": Traffic(0.535, 553.4, 233.0, 427.75, 115),
    "resnext-110": Traffic(0.226, 6.92, 59.5, 63.0, 390),
    "inception-bn": Traffic(0.815, 42.1, 145.875, 1082.125, 120),
    "seq2seq": Traffic(0.075, 36.5, 120.125, 181.125, 780),
    "cnn-text": Traffic(0.585, 24.0, 60.75, 159.625, 193),
    "dssm": Traffic(0.567, 6.0, 92.125, 65.625, 349),
    "wlm": Traffic(0.154, 19.2, 10.375, 22.875, 165),
}


def step_time_s(traffic: Traffic, tasks: Iterable[tuple[int, int]]) -> float:
    """Seconds per step, given (servers, workers) on each node in use."""
    tasks = [(whole("servers on a node", p, 0), whole("workers on a node", w, 0)) for p, w in tasks]
    tasks = [t for t in tasks if t[0] + t[1] > 0]
    servers, workers = sum(p for p, _ in tasks), sum(w for _, w in tasks)
    if servers < 1 or workers < 1:
        raise ShoalError(f"training needs at least one server and one worker, not {servers} and {workers}")
    fewest_beside_a_server = min(w for p, w in tasks if p > 0)
    piece_mb = traffic.size_mb / servers
    slowest = 0.0
    for p_here, w_here in tasks:
        if w_here == 0:
            continue
        exchange_s = 0.0
        if p_here > 0:
            exchange_s = 2 * piece_mb * max(p_here, w_here) / traffic.intra_mb_s
        if p_here < servers:
            streams = max(servers - p_here, workers - fewest_beside_a_server)
            exchange_s = max(exchange_s, 2 * piece_mb * streams / traffic.inter_mb_s)
        slowest = max(slowest, exchange_s)
    return traffic.compute_s + slowest


#: The layouts of one server and two workers; a colon separates nodes.
LAYOUTS = ("pww", "p:w:w", "pw:w", "p:ww")
#: Seconds that Liquid's jobs took in each layout.
LAYOUT_TIME_S: Mapping[str, Mapping[str, float]] = {
    "vgg16": dict(zip(LAYOUTS, (510.0, 810.0, 767.0, 1190.0))),
    "resnet50": dict(zip(LAYOUTS, (203.0, 210.0, 204.0, 255.0))),
    "inception3": dict(zip(LAYOUTS, (289.0, 290.0, 295.0, 310.0))),
}


def layout(ps_nodes: Sequence[int], worker_nodes: Sequence[int]) -> str:
    """The measured layout that this placement has."""
    if len(ps_nodes) != 1 or len(worker_nodes) != 2:
        raise ShoalError(
            f"measured are one server and two workers, not {len(ps_nodes)} and {len(worker_nodes)}; "
            "use step_time_s for others"
        )
    together = worker_nodes[0] == worker_nodes[1]
    beside = sum(node == ps_nodes[0] for node in worker_nodes)
    return {(True, 2): "pww", (True, 0): "p:ww", (False, 1): "pw:w", (False, 0): "p:w:w"}[together, beside]


def layout_time_s(model: str, ps_nodes: Sequence[int], worker_nodes: Sequence[int]) -> float:
    """Seconds that Liquid measured for this model in this placement."""
    if model not in LAYOUT_TIME_S:
        raise ShoalError(f"nothing was measured for {model!r}; {did_you_mean(model, LAYOUT_TIME_S)}")
    return LAYOUT_TIME_S[model][layout(ps_nodes, worker_nodes)]


def tasks_by_node(placement: Placement, servers: int, *, apart: bool = False) -> list[tuple[int, int]]:
    """(servers, workers) on each node of a job with this placement of workers.

    Servers need no GPU. They are distributed evenly over the nodes of the workers, starting with the node
    that has the most workers. With `apart`, they are all on one node without workers.
    """
    whole("the servers of a job", servers, 0)
    workers = sorted((whole("the GPUs on a node", gpus, 1) for _, gpus in placement), reverse=True)
    if not workers:
        raise ShoalError("a job without a placement has no tasks on any node")
    if apart:
        return [(servers, 0), *((0, w) for w in workers)]
    k = len(workers)
    return [(servers // k + (i < servers % k), w) for i, w in enumerate(workers)]


def slowdown(model: str, placement: Placement, servers: int, *, apart: bool = False) -> float:
    """The step time relative to that on one node; 1 if the model was not measured.

    Uses Liquid's measured layouts for one server and two workers of a model that Liquid measured, else the
    step-time model with DL2's constants. Never below 1: profiles give the speed of a packed share.
    """
    if not placement:
        return 1.0
    tasks = tasks_by_node(placement, servers, apart=apart)
    workers = [node for node, (_, count) in enumerate(tasks) for _ in range(count)]
    ps = [node for node, (count, _) in enumerate(tasks) for _ in range(count)]
    if model in LAYOUT_TIME_S and (len(ps), len(workers)) == (1, 2):
        return layout_time_s(model, ps, workers) / LAYOUT_TIME_S[model]["pww"]
    traffic = _TRAFFIC_BY_PLAIN_NAME.get(_plain(model))
    if traffic is None or not ps:
        return 1.0
    return max(step_time_s(traffic, tasks) / step_time_s(traffic, [(len(ps), len(workers))]), 1.0)


def is_measured(model: str) -> bool:
    """Whether the slowdown by placement is known for parameter-server jobs of this model."""
    return model in LAYOUT_TIME_S or _plain(model) in _TRAFFIC_BY_PLAIN_NAME


def _plain(model: str) -> str:
    """A normalised name: `ResNet-50` and `resnet50` are the same model."""
    return model.lower().replace("-", "").replace("_", "")


_TRAFFIC_BY_PLAIN_NAME = {_plain(model): traffic for model, traffic in TRAFFIC.items()}
