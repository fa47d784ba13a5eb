"""An elastic job: steps.py STEPS STEP_S. Each worker says which GPU it has, and prints its steps.

A step takes STEP_S divided by the workers, as on GPUs. At the end the first worker prints the loss of all samples,
which is the same on any number of workers.
"""

import os
import sys
import time

import shoal.torch as shoal
import torch

STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])

torch.manual_seed(0)
job = shoal.init()
print("on GPU", os.environ.get("SHOAL_GPU"), flush=True)
model = torch.nn.Linear(4, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
x_all, y_all = torch.randn(STEPS * 12, 4), torch.randn(STEPS * 12, 1)
loss_of = torch.nn.functional.mse_loss
for _ in job.epochs(1):
    for x, y in job.loader(torch.utils.data.TensorDataset(x_all, y_all), batch_size=12):
        step, counts = job.position.step, not job.rehearsing
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        time.sleep(STEP_S / job.world_size)
        optimizer.step()
        job.log(loss=loss)
        if counts:
            print(f"step {step}", flush=True)
if job.is_main:
    with torch.no_grad():
        print(f"loss {loss_of(model(x_all), y_all).item():.6f}", flush=True)
