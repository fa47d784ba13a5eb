"""Gradient synchronization: flat buckets that are summed while backward continues.

Backward makes one gradient after the other. A hook scales each by the worker's share of the batch, writes it into its
slot in a flat bucket, and makes `.grad` a view of that slot at once. So autograd reuses the memory for the next
gradient; to keep it until the end of the step would cost a page fault per 4 KiB of model in every step. Each bucket
is all-reduced while backward continues, and nothing is copied back. The synchronizing function is replaceable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shoal.torch.aside import WIDTH, Aside
from torch import Tensor, nn

MIB = 1024 * 1024
SMALL_MIB = 8
Sync = Callable[[Any, Tensor], Any]
"""(group, flat tensor) -> work with wait(): sum the tensor over the members, in place."""


def all_reduce(group: Any, flat: Tensor) -> Any:
    return group.allreduce([flat])


class Done:
    """The finished work of a sum over one member."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def sum_of_one(group: Any, flat: Tensor) -> Any:
    return Done()


@dataclass(slots=True)
class Slot:
    """A parameter's place in its bucket."""

    param: Tensor
    view: Tensor
    taken: bool = False  # its gradient of this backward is in the bucket
    holds: bool = False  # it has a gradient of this step's micro-batches so far


@dataclass(slots=True)
class Bucket:
    flat: Tensor
    slots: list[Slot]
    extra: Tensor | None = None
    waiting: int = 0


def running_stats(model: nn.Module) -> list[Tensor]:
    """Batch-norm statistics: averaged over the workers with the gradients, so that all workers stay identical."""
    return [
        stat
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        for stat in (module.running_mean, module.running_var)
        if stat is not None
    ]


def batch_counts(model: nn.Module) -> list[Tensor]:
    """The number of batches that each batch norm has seen."""
    return [
        module.num_batches_tracked
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.num_batches_tracked is not None
    ]


class GradientBuckets:
    """The buckets of a model. `arm` before each backward; `complete` is called at its end."""

    def __init__(
        self,
        model: nn.Module,
        bucket_mib: float = 25.0,
        first_mib: float = 1.0,
        complete: Callable[[], None] = lambda: None,
        others: Sequence[Tensor] = (),
        part_complete: Callable[[], None] = lambda: None,
        aside: Aside | None = None,
    ) -> None:
        parameters = [*model.parameters(), *others]
        self.params = [p for p in parameters if p.requires_grad]
        self.stats, self._counts = running_stats(model), batch_counts(model)
        self._frozen = [p for p in parameters if not p.requires_grad]
        self._complete, self._part_complete = complete, part_complete
        self.aside = aside or Aside()
        # The all-reduce of a small model costs latency, not bandwidth: one bucket instead of several.
        total_mib = sum(p.numel() * p.element_size() for p in self.params) / MIB
        self._sizes = (
            (total_mib * MIB,) * 2 if total_mib <= SMALL_MIB else (first_mib * MIB, bucket_mib * MIB)
        )
        self._build()
        #: Batch-norm statistics and counts after the last completed step, for a step that has to be done again.
        self.good: tuple[Tensor, Tensor | None] | None = None
        self._armed = False
        self._observing = False  # the buckets are summed without this worker's gradients
        self._closed = False  # the backward of this micro-batch is over
        self._passing: Tensor | None = None  # observing: the parameter whose gradient was made last
        self._queued = False
        self._next = 0
        self.works: list[Any] = []
        self._group: Any = None
        self._sync: Sync = all_reduce
        self._weight = self._share = 1.0
        self._earlier: float | None = 1.0
        self._looks_before = False
        self._last = True
        self._scaled = True
        self._when_begun: Callable[[], None] | None = None
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._hook)

    def _build(self) -> None:
        """New memory: a broken collective may still write into the old one."""
        self.buckets: list[Bucket] = []
        run: list[Tensor] = []
        run_bytes, limit = 0, self._sizes[0]
        for param in reversed(self.params):
            kind = (param.dtype, param.device)
            if run and (kind != (run[0].dtype, run[0].device) or run_bytes >= limit):
                self._close(run)
                run, run_bytes, limit = [], 0, self._sizes[1]
            run.append(param)
            run_bytes += param.numel() * param.element_size()
        self._close(run, last=True)
        self._home = {id(s.param): (b, s) for b in self.buckets for s in b.slots}
        self._slots = [self._home[id(p)][1] for p in self.params]

    def _close(self, run: list[Tensor], last: bool = False) -> None:
        extra_size = WIDTH + len(self.params) + sum(s.numel() for s in self.stats) if last else 0
        separate = bool(run) and (run[0].dtype != torch.float32 or run[0].device.type != "cpu")
        if run:
            inside = 0 if separate else extra_size
            flat = torch.zeros(sum(p.numel() for p in run) + inside, dtype=run[0].dtype, device=run[0].device)
            slots, offset = [], 0
            for p in run:
                slots.append(Slot(p, flat[offset : offset + p.numel()].view(p.shape)))
                offset += p.numel()
            self.buckets.append(Bucket(flat, slots, flat[offset:] if inside else None))
        if last and (separate or not run):
            flat = torch.zeros(extra_size, device=run[0].device if run else "cpu")
            self.buckets.append(Bucket(flat, [], flat))

    def renew(self) -> None:
        """Make new buckets and move the gradients to them.

        A worker that observed has no gradients of its own; the rest of its loop's body, which has no effect, may
        still use some.
        """
        self._build()
        for slot in self._slots:
            if self._observing or slot.param.grad is not None:
                slot.param.grad = slot.view

    def arm(
        self,
        group: Any,
        sync: Sync,
        weight: float,
        first: bool,
        last: bool,
        share: float | None = None,
        earlier: float | None = 1.0,
    ) -> None:
        """The next backward is summed in this group. `first`, `last`: of the step's micro-batches.

        `weight` is that of its gradients, `share` that of batch-norm statistics: this worker's share of the samples.
        `earlier` as for `reweigh`.
        """
        self._group, self._sync, self._last = group, sync, last
        self.reweigh(weight, earlier)
        self._share, self._scaled, self._when_begun = weight if share is None else share, False, None
        self._armed, self._observing, self._closed, self._queued = True, False, False, False
        self._next, self.works = 0, []
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)
            for slot in bucket.slots:
                slot.taken, slot.holds = False, slot.holds and not first

    def reweigh(self, weight: float, earlier: float | None = 1.0) -> None:
        """Set the weight of the next backward's gradients.

        A gradient from before, to which backward adds, is a sum of all workers already. Each multiplies it by
        `earlier`, so that it counts once in the next sum. None: the factor is not known yet, so there must be none.
        """
        self._weight, self._earlier = weight, earlier
        if earlier != 1.0 and not self._looks_before:
            self._looks_before = True
            for param in self.params:
                param.register_hook(lambda _, param=param: self._before(param))

    def let_go(self) -> None:
        """The buckets receive the others' sums now: no gradient may be a view of them."""
        self.works = []
        for slot in self._slots:
            slot.param.grad = None

    def observe(self, group: Any, sync: Sync) -> None:
        """Add zeros to the sums of the coming step now: the others do not wait for this worker's backward."""
        self.let_go()
        for bucket in self.buckets:
            bucket.flat.zero_()
            self.works.append(sync(group, bucket.flat))

    def watch(self, last: bool = True) -> None:
        """Only call `complete` at the end of the next backward: all buckets are being summed already."""
        self._armed, self._observing, self._closed, self._queued = True, True, False, False
        self._next, self._last, self._passing = len(self.buckets), last, None
        self._scaled, self._when_begun = False, None

    def disarm(self) -> None:
        self._armed = self._closed = False
        self._when_begun = None

    def report_next(self, begun: Callable[[], None]) -> None:
        """Do not sum the next backward: call `begun` when it begins."""
        self._armed, self._closed, self._when_begun = False, False, begun

    def check_frozen(self) -> None:
        """A parameter that requires gradients only later is in no bucket: the workers would diverge."""
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "a frozen parameter was unfrozen after job.wrap(): let it require gradients there, "
                "and keep its learning rate at 0 until it is wanted"
            )

    def _before(self, param: Tensor) -> None:
        """Backward adds to this parameter's gradient next."""
        if self._armed and not self._observing:
            self._count_once(param)

    def _count_once(self, param: Tensor) -> None:
        if param.grad is None or self._earlier == 1.0:
            return
        if self._earlier is not None:
            param.grad.detach().mul_(self._earlier)
        elif param.grad.any():
            raise RuntimeError(
                "the gradients of the last step are still there: call optimizer.zero_grad() in each"
            )

    def _hook(self, param: Tensor) -> None:
        if self._closed:
            raise RuntimeError(
                "backward() was called twice for one batch: add the losses up and call it once "
                "(and checkpoint activations with use_reentrant=False)"
            )
        if self._when_begun is not None:
            begun, self._when_begun = self._when_begun, None
            begun()
        if not self._armed:
            return
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if self._observing:
            # Only the script's own hooks need it, which run after this one. Autograd reuses its memory for the next.
            if self._passing is not None:
                self._passing.grad = None
            self._passing = param
            return
        bucket, slot = self._home[id(param)]
        self._take(slot)
        bucket.waiting -= 1
        if self._last and bucket.waiting == 0:
            self._launch_ready()

    def _take(self, slot: Slot) -> None:
        """Add the worker's part of a gradient to its bucket."""
        grad, slot.taken = slot.param.grad, True
        if grad is None:
            return
        if grad.is_sparse:
            raise RuntimeError("sparse gradients are not supported: use Embedding(sparse=False)")
        grad = grad.detach()  # of backward(create_graph=True)
        if self._weight != 0.0:  # the gradient of a worker without a part may be NaN, and 0 x NaN is NaN
            if slot.holds:
                slot.view.add_(grad, alpha=self._weight)
            else:
                torch.mul(grad, self._weight, out=slot.view)
            slot.holds = True
        # If more micro-batches follow, autograd makes a new one.
        slot.param.grad = slot.view if self._last else None

    def _launch_ready(self) -> None:
        # In a fixed order: the members must pair equal buckets.
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        self._take_rest(bucket)
        for slot in bucket.slots:
            if not slot.holds:
                slot.view.zero_()
        if bucket.extra is not None:
            self._pack_extra(bucket.extra)
        self.works.append(self._sync(self._group, bucket.flat))

    def _take_rest(self, bucket: Bucket) -> None:
        """Parameters that this backward did not reach may have a gradient from before."""
        for slot in bucket.slots:
            if not slot.taken:
                self._count_once(slot.param)
                self._take(slot)

    def _pack_extra(self, extra: Tensor) -> None:
        self.aside.write(extra[:WIDTH])
        offset = WIDTH + len(self.params)
        extra[WIDTH:offset] = torch.tensor([slot.holds for slot in self._slots], dtype=extra.dtype)
        for stat in self.stats:
            part = extra[offset : offset + stat.numel()]
            if self._share == 0.0:
                part.zero_()
            else:
                torch.mul(stat.reshape(-1), self._share, out=part)
            offset += stat.numel()

    def _end_of_backward(self) -> None:
        if not self._armed:
            return
        if not self._last:
            if not self._observing:
                for bucket in self.buckets:
                    self._take_rest(bucket)
            self._armed, self._closed = False, True
            self._part_complete()
            return
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._next = len(self.buckets)
        self._armed, self._closed = False, True
        self._complete()

    def install(self, keep_stats: bool = True) -> None:
        """The sums are complete: make them the gradients that the optimizer sees.

        `keep_stats`: a step that is done again starts from the statistics of now.
        """
        extra = self.buckets[-1].extra
        assert extra is not None
        self.aside.read(extra[:WIDTH])
        count = WIDTH + len(self.params)
        for slot, users in zip(self._slots, extra[WIDTH:count].tolist()):
            # A parameter that no worker used has no gradient, as in a single process. That includes a gradient from
            # the shadow samples of a worker without a part of this batch.
            slot.param.grad = slot.view if users > 0 else None
        if keep_stats:
            self.good = extra[count:].clone(), self._counted()
        self._set_stats(extra[count:])

    def scale(self) -> None:
        """Divide the sums by what all workers' gradients count together, once nobody reads them any more."""
        if self.aside.total and not self._scaled:
            for bucket in self.buckets:
                for slot in bucket.slots:
                    slot.view.div_(self.aside.total)
        self._scaled = True

    def _counted(self) -> Tensor | None:
        return torch.stack(self._counts) if self._counts else None

    @property
    def good_on_host(self) -> tuple[Tensor | None, ...] | None:
        return None if self.good is None else tuple(None if t is None else t.cpu() for t in self.good)

    def keep_stats(self) -> None:
        """Before the first step of a generation. A single member does not keep them."""
        flat = [stat.detach().reshape(-1) for stat in self.stats]
        self.good = torch.cat(flat) if flat else torch.zeros(0), self._counted()

    def restore_stats(self) -> None:
        """Set batch-norm statistics and counts back to those after the last completed step."""
        if self.good is None:
            return
        stats, counts = self.good
        self._set_stats(stats)
        for mine, value in zip(self._counts, counts if counts is not None else ()):
            mine.copy_(value)

    def _set_stats(self, flat: Tensor) -> None:
        offset = 0
        for stat in self.stats:
            stat.copy_(flat[offset : offset + stat.numel()].view_as(stat))
            offset += stat.numel()


def parameter_lines(params: Sequence[tuple[str, Tensor]], word: str) -> list[str]:
    """One line per tensor; two models fit each other exactly if their lines are equal."""
    return [f"{word} {name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for name, p in params]
