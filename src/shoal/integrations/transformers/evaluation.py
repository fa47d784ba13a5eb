"""Evaluation by all workers, with the same batches and the same result as on one."""

from __future__ import annotations

import math
from typing import Any

from accelerate.utils import send_to_device
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize


def has_length(dataloader: Any) -> bool:
    return hasattr(getattr(dataloader, "dataset", None), "__len__")


class EvaluationBatches:
    """The batches of a data set, as one process would have them: workers share batches, not samples."""

    def __init__(self, dataset: Any, batch_size: int, collate: Any) -> None:
        self._dataset, self._batch_size, self._collate = dataset, batch_size, collate

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        begin = index * self._batch_size
        chosen = range(begin, min(begin + self._batch_size, len(self._dataset)))
        return self._collate([self._dataset[i] for i in chosen])


def only(items: list[Any]) -> Any:
    return items[0]


def evaluate_together(
    trainer: Any,
    dataloader: Any,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> EvalLoopOutput:
    args = trainer.args
    losses_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    model = trainer._wrap_model(trainer.model, training=False)
    model.eval()
    trainer.callback_handler.eval_dataloader = dataloader
    batches = EvaluationBatches(dataloader.dataset, args.eval_batch_size, dataloader.collate_fn)
    loader = trainer.job.eval_loader(batches, 1, collate_fn=only, num_workers=args.dataloader_num_workers)
    mine: list[Any] = []

    def step(inputs: Any) -> tuple[Any, ...]:
        mine.append((find_batch_size(inputs), *_predict(trainer, model, inputs, losses_only, ignore_keys)))
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
        return tuple(mine[-1])

    # A worker whose evaluation does not count has only its own values.
    found = loader.collect(step) or mine
    return _summary(trainer, found, len(dataloader.dataset), metric_key_prefix)


def _predict(trainer: Any, model: Any, inputs: Any, losses_only: bool, ignore_keys: Any) -> tuple[Any, ...]:
    """(loss, predictions, labels, inputs) of a batch, on the CPU."""
    loss, logits, labels = trainer.prediction_step(model, inputs, losses_only, ignore_keys=ignore_keys)
    if logits is not None and trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    name = getattr(trainer.model, "main_input_name", "input_ids")
    shown = inputs[name] if "inputs" in trainer.args.include_for_metrics else None
    value = None if loss is None else float(loss)
    return value, send_to_device(logits, "cpu"), send_to_device(labels, "cpu"), send_to_device(shown, "cpu")


def _summary(trainer: Any, batches: list[Any], samples: int, prefix: str) -> EvalLoopOutput:
    """As the Trainer does it: each batch's loss counts as often as it has samples."""
    args = trainer.args
    kept = [EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100) for _ in range(3)]
    for _, _, *values in batches:
        for container, value in zip(kept, values, strict=True):
            if value is not None:
                container.add(value)
    predictions, labels, inputs = (container.get_arrays() for container in kept)
    counted = [(loss, size) for size, loss, *_ in batches if loss is not None]
    if args.logging_nan_inf_filter:
        counted = [(loss, size) for loss, size in counted if math.isfinite(loss)] or counted
    metrics: dict[str, Any] = {}
    if trainer.compute_metrics is not None and predictions is not None and labels is not None:
        also = {"inputs": inputs} if "inputs" in args.include_for_metrics else {}
        metrics = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **also))
    metrics = denumpify_detensorize(metrics)
    if counted:
        metrics["loss"] = sum(loss * size for loss, size in counted) / sum(size for _, size in counted)
    named = {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": v for k, v in metrics.items()}
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=named, num_samples=samples)
