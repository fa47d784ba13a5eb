"""Trains a model whose forward takes no `**kwargs`, so its loss is the mean over each batch's tokens. Few have any."""

import json
import os
from pathlib import Path

from torch.utils.data import Dataset
from transformers import TrainingArguments

import torch
from shoal.integrations.transformers import ElasticTrainer
from torch import nn

SIZE, LENGTH = 12, 9


class Sequences(Dataset):
    """The first two of four in a row have no labels, and are the first of two workers' part."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index * 5 + torch.arange(LENGTH) * (1 + index % 3)) % SIZE
        labels = (tokens * 7 + 3) % SIZE
        labels[(index * index) % LENGTH if index % 4 > 1 else 0 :] = -100
        labels[0] = 1 if index % 4 == 3 else labels[0]
        return {"input_ids": tokens, "labels": labels}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(SIZE, 16), nn.Linear(16, SIZE))

    def forward(self, input_ids, labels=None):
        logits = self.body(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


torch.manual_seed(0)
output = Path(os.environ["OUTPUT_DIR"])
args = TrainingArguments(
    output_dir=str(output), per_device_train_batch_size=4, gradient_accumulation_steps=int(os.environ["ACCUMULATE"]),
    max_steps=8, learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", train_sampling_strategy="sequential",
    logging_steps=1, logging_nan_inf_filter=False, max_grad_norm=0.0, save_strategy="no", report_to="none",
    disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = ElasticTrainer(model=Tagger(), args=args, train_dataset=Sequences())
trainer.train()
found = {
    "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    "weights": sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters()),
}
output.mkdir(exist_ok=True)
(output / f"{os.environ.get('SHOAL_WORKER', 'alone')}.json").write_text(json.dumps(found))
