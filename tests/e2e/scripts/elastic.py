"""A small elastic job: so many steps, each taking its time divided by the workers (to some power), as GPUs would."""

import sys
import time

import shoal.torch as shoal
import torch

STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])
SCALING = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0

torch.manual_seed(0)
job = shoal.init()
model = torch.nn.Linear(4, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(STEPS * 12, 4), torch.randn(STEPS * 12, 1))
for _ in job.epochs(1):
    for step, (x, y) in enumerate(job.loader(data, batch_size=12)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        time.sleep(STEP_S / job.world_size**SCALING)
        optimizer.step()
        job.log(loss=loss)
        if job.is_main:
            print(f"step {step} of {STEPS} on {job.world_size}", flush=True)
