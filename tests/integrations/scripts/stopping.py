"""Fine-tuning that ends early, or after MAX_STEPS, and returns to its best checkpoint.

The best loss is the largest one, so the first evaluation, after EVAL_STEPS, is the best, and two more end the training.
"""

import json
import os
import runpy
from pathlib import Path

from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments

import torch
from shoal.integrations.transformers import ElasticTrainer

example = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples/transformers/fine_tune.py"))
Phrases = example["Phrases"]
output = Path(os.environ["OUTPUT_DIR"])
every = int(os.environ.get("EVAL_STEPS", "5"))
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=example["VOCABULARY"], n_positions=example["LENGTH"], n_embd=16, n_layer=1, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
args = TrainingArguments(
    output_dir=str(output), per_device_train_batch_size=7, max_steps=int(os.environ["MAX_STEPS"]),
    learning_rate=3e-3, eval_strategy="steps", eval_steps=every, save_steps=every, load_best_model_at_end=True,
    metric_for_best_model="eval_loss", greater_is_better=True, logging_steps=1, report_to="none", disable_tqdm=True,
    use_cpu=True,
)  # fmt: skip
trainer = ElasticTrainer(
    model=GPT2LMHeadModel(config),
    args=args,
    train_dataset=Phrases(50, seed=1),
    eval_dataset=Phrases(33, seed=2),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
trainer.save_model()
found = {
    "steps": trainer.state.global_step,
    "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    "evaluated": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
    "weights": sum(float(p.double().abs().sum()) for p in trainer.model.parameters()),
}
(output / "found").mkdir(exist_ok=True)
(output / "found" / f"{os.environ.get('SHOAL_WORKER', 'alone')}.json").write_text(json.dumps(found))
