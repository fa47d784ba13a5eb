"""`shoal.torch` as the script sees it: a job whose workers may change between any two steps."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from shoal.torch.checkpoint import write_atomically
from shoal.torch.gradients import GradientBuckets
from shoal.torch.loader import Loader
from shoal.torch.order import BatchRule
from shoal.torch.state import ModelState
from shoal.torch.stepping import Stepping
from shoal.torch.worker import Identity
from shoal.wire.messages import Phase
from torch import nn


class Job(Stepping):
    """Made by `shoal.torch.init`."""

    def __init__(self, identity: Identity | None, **options: Any) -> None:
        super().__init__(identity, **options)
        if self._worker is not None:
            self._worker.link.start()
            self._hook_exits()

    @property
    def is_main(self) -> bool:
        """Whether this worker should print, evaluate or save: rank 0, in steps that count."""
        return self.rank == 0 and not self._aside

    @property
    def stepping(self) -> bool:
        """With `accumulate`: whether this micro-batch completes the step."""
        return self._step is None or self._step.part.last

    @property
    def weight(self) -> float:
        """This worker's share of the present batch."""
        return self._step.part.weight if self._step is not None and not self._aside else 0.0

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, bucket_mib: float = 25.0
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make a model and its optimizer elastic. The same objects come back."""
        if self._model_state is not None:
            raise RuntimeError("wrap() was called twice: put all parameters into one model and one optimizer")
        self._model_state = ModelState(model, optimizer, self.state)
        # Batch norm does not train on a single sample, which a small last batch would leave to a worker.
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            self._least = 2
        original = optimizer.step

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._optimizer_step(original, *args, **kwargs)

        # Bound to the optimizer, as learning-rate schedulers expect that wrap it in turn.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        if self._worker is not None:
            self._worker.cuda = any(p.is_cuda for p in model.parameters())
            others = self._model_state.others
            self._buckets = GradientBuckets(model, bucket_mib, complete=self._end_of_backward, others=others)
        return model, optimizer

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        lr_rule: str = "linear",
        warmup_steps: int = 20,
        accumulate: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """The training data. `batch_size` is that of all workers together; `options` go to torch's DataLoader."""
        if self._loader is not None:
            raise RuntimeError("a job has one training loader; use a plain DataLoader to evaluate")
        for name in ("sampler", "batch_sampler", "drop_last", "persistent_workers", "in_order"):
            if name in options:
                raise ValueError(f"{name} cannot be given: the order of the data belongs to the job")
        rule = BatchRule(batch_size, max_batch_size, lr_rule, warmup_steps)
        self._loader = Loader(
            self,
            dataset,
            rule,
            accumulate=accumulate,
            shuffle=shuffle,
            seed=self.seed,
            num_workers=num_workers,
            collate_fn=collate_fn,
            **options,
        )
        return self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to do, wherever the job stands."""
        if count < 1:
            raise ValueError(f"epochs must be at least 1, not {count}")
        self._epochs = count
        if self._should_rehearse():
            self._rehearsing = True
            yield 0
            self._rehearsing, self._step = False, None
        self._join()
        self._in_epochs = True
        while self.position.epoch < count:
            self._set_away(True)
            yield self.position.epoch
            self._settle()
            if not self._joined:
                self._join()  # its generation broke before it had the whole state
                continue
            self.position.epoch += 1
            self.position.cursor = 0
        self._in_epochs = False
        self._finish()

    def log(self, **values: Any) -> None:
        """Values to report (the last of each is kept): numbers, or tensors of one element."""
        if not self._aside:
            for name, value in values.items():
                self.meter.values[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def checkpoint(self, path: str | Path | None = None) -> bool:
        """Save the whole state, at rank 0, whole or not at all. False if it could not be written."""
        target = path or self.checkpoint_path
        if target is None:
            self._note("checkpoint() has nowhere to write: give it a path, or init(checkpoint=...)")
            return False
        if self._aside or self.rank != 0:
            return True
        state = self._state()
        facts = self._facts()
        before = self._set_away(True)
        try:
            write_atomically(target, lambda file: state.save(facts, file))
        except OSError as error:
            self._note(
                f"checkpoint at step {facts['position'].step} not written: {error}; the last one is kept"
            )
            return False
        finally:
            self._set_away(before)
        self.meter.saved.append((str(target), facts["position"].step))
        self._saved_s = time.monotonic()
        return True

    def _finish(self) -> None:
        if self._worker is not None:
            if self._catching_up is not None:
                # The others are done before this worker had the whole state: there is nothing to finish with.
                self._worker.member.left()
                self._leave(self._worker)
            with self._worker.lock:
                self._worker.member.finish()
            self._worker.link.say_now()

    def _hook_exits(self) -> None:
        worker = self._worker
        assert worker is not None
        previous, leave = sys.excepthook, sys.exit
        codes: list[Any] = []
        me = os.getpid()

        def fail(why: str) -> None:
            if os.getpid() != me:
                return  # a process that the script has forked does not speak for it
            with worker.lock:
                worker.member.fail(why)
            worker.link.say_now()

        def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            fail("".join(traceback.format_exception(kind, error, trace)))
            previous(kind, error, trace)

        def leaving(status: Any = None, /) -> NoReturn:
            codes.append(status)
            leave(status)

        def ended() -> None:
            if os.getpid() != me:
                return
            if worker.member.phase in (Phase.STARTING, Phase.ACTIVE):
                if codes and codes[-1]:
                    fail(f"the script called sys.exit({codes[-1]!r})")
                else:
                    self._finish()
            if worker.member.phase is Phase.FINISHED and worker.link.up.is_set():
                with worker.lock:
                    worker.lock.wait_for(lambda: worker.quit is not None, timeout=10.0)

        sys.excepthook, sys.exit = failed, leaving
        atexit.register(ended)
