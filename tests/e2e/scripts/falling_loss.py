"""An elastic job whose loss falls by 0.01 with each step, from 2 on. Every worker prints its steps.

With two workers its batch is 8 instead of 4.
"""

import time

import shoal.torch as shoal
import torch

job = shoal.init()
model = torch.nn.Linear(4, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(100_000 * 4, 4), torch.randn(100_000 * 4, 1))
loader = job.loader(data, batch_size=4, max_batch_size=8)
for _ in job.epochs(1):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        time.sleep(0.05)
        optimizer.step()
        job.log(loss=2.0 - 0.01 * step)
        print(f"done {step}", flush=True)
