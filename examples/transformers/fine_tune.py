"""Fine-tune a small language model, elastically. Only two lines differ from a plain script: the Trainer and its import.

The model is built from a config and the text is made up, so that nothing is downloaded and a run takes seconds.

    python examples/transformers/fine_tune.py                                      # one process
    shoal run --gpus 1..4 -- python examples/transformers/fine_tune.py             # elastically
"""

from __future__ import annotations

import os

from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments

import torch
from shoal.integrations.transformers import ElasticTrainer

VOCABULARY, LENGTH = 64, 24


class Phrases(Dataset):
    """Counting up from a random number, in phrases of different lengths. The rest is padding, which has no loss."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.begin = torch.randint(0, VOCABULARY, (count,), generator=random)
        self.length = torch.randint(4, LENGTH + 1, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.begin[index] + torch.arange(LENGTH)) % VOCABULARY
        real = torch.arange(LENGTH) < self.length[index]
        return {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens.masked_fill(~real, -100)}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=os.environ.get("OUTPUT_DIR", "fine-tuned"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=float(os.environ.get("EPOCHS", "3")),
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ElasticTrainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Phrases(640, seed=1),
        eval_dataset=Phrases(64, seed=2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
