"""Fine-tuning with a progress bar and a tracker of experiments, which only rank 0 opens. MLFLOW is where MLflow is."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from shoal.integrations.transformers import ElasticTrainer

sys.path[:0] = [os.environ["MLFLOW"]] if "MLFLOW" in os.environ else []
example = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples/transformers/fine_tune.py"))
Phrases = example["Phrases"]
output = Path(os.environ["OUTPUT_DIR"])
output.mkdir(exist_ok=True)


class Tracker(TrainerCallback):
    """Has the structure of Transformers' callbacks for W&B and MLflow."""

    def __init__(self) -> None:
        self._initialized = False
        self._run: TextIO | None = None

    def setup(self, state: Any) -> None:
        self._initialized = True
        if state.is_world_process_zero:
            assert self._run is None, "the run is already open"
            self._run = (output / os.environ["SHOAL_WORKER"]).open("w")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._initialized:
            self.setup(state)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._initialized:
            self.setup(state)
        if state.is_world_process_zero:
            assert self._run is not None, "open the run before you log"
            print(state.global_step, file=self._run, flush=True)


config = GPT2Config(
    vocab_size=example["VOCABULARY"], n_positions=example["LENGTH"], n_embd=16, n_layer=1, n_head=2,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
args = TrainingArguments(
    output_dir=str(output), per_device_train_batch_size=8, max_steps=30, logging_steps=1, save_strategy="no",
    report_to="mlflow" if "MLFLOW" in os.environ else "none", use_cpu=True, disable_tqdm=False,
)  # fmt: skip
trainer = ElasticTrainer(
    model=GPT2LMHeadModel(config), args=args, train_dataset=Phrases(80, seed=1), callbacks=[Tracker()]
)
trainer.train()
