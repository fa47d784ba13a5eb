"""An elastic job: train.py STEPS FAST. Slow until the file FAST exists; it prints a sum of its weights."""

import os
import sys
import time

import shoal.torch as shoal
import torch

STEPS, FAST = int(sys.argv[1]), sys.argv[2]

torch.manual_seed(0)
job = shoal.init()
print(f"at {os.environ.get('SHOAL_HOST')}", flush=True)
model = torch.nn.Linear(4, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(STEPS * 12, 4), torch.randn(STEPS * 12, 1))
for _ in job.epochs(1):
    for step, (x, y) in enumerate(job.loader(data, batch_size=12)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        if job.world_size > 1 and not os.path.exists(FAST):
            time.sleep(0.2 / job.world_size)
        optimizer.step()
        if job.is_main:
            print(f"step {step}", flush=True)
if job.is_main:
    print(f"weights {sum(p.detach().sum().item() for p in model.parameters()):.4f}", flush=True)
