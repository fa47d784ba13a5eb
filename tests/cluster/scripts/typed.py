"""An elastic job: typed.py [GAIN] [SPREAD]. A step takes 0.2 s, GAIN times less on the type `fast`.

While the file SPREAD exists, steps take four times as long, as they may when a job spans machines.
"""

import os
import sys
import time

import shoal.torch as shoal
import torch

GAIN = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
SPREAD = sys.argv[2] if len(sys.argv) > 2 else os.devnull + "/none"

job = shoal.init()
PLACE = f"at {os.environ['SHOAL_HOST']} on {os.environ['SHOAL_GPU_TYPE']}"
print(PLACE, flush=True)
model = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.zeros(1_000_000, 2), torch.zeros(1_000_000, 1))
for x, y in job.loader(data, batch_size=4):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    step_s = 0.2 / (GAIN if os.environ["SHOAL_GPU_TYPE"] == "fast" else 1.0)
    time.sleep(step_s * (4 if os.path.exists(SPREAD) else 1))
    optimizer.step()
    if job.is_main:
        print(f"step {job.position.step} {PLACE}", flush=True)
