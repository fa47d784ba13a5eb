"""What docs/frameworks.md says about Accelerate: a schedule, rank 0 and values of all workers. WAY: prepare or wrap."""

import json
import os
from pathlib import Path

from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import shoal.torch as shoal
import torch
from shoal.integrations.accelerate import prepare

output = Path(os.environ["OUTPUT_DIR"])
output.mkdir(exist_ok=True)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
data = TensorDataset(torch.arange(12.0).reshape(6, 2))
if os.environ["WAY"] == "prepare":
    loader = DataLoader(data, batch_size=3)
    job, model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule)
else:
    job = shoal.init()
    job.wrap(model, optimizer, schedulers=[schedule])
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    loader = job.loader(data, batch_size=3)
for _ in job.epochs(1):
    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(x).mean())
        optimizer.step()
        schedule.step()
    found = {
        "rate": schedule.get_last_lr(),
        "steps": job.position.step,
        "main": job.is_main,
        "ranks": job.gather(job.rank),
        "accelerate": [accelerator.num_processes, len(accelerator.gather_for_metrics(torch.ones(1)))],
    }
(output / f"{os.environ['SHOAL_WORKER']}.json").write_text(json.dumps(found))
