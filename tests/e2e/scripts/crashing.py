"""A live job whose workers kill themselves at a step: all of them, or only the last one.

crashing.py all|last STEP
"""

import os
import signal
import sys
import time

import shoal.torch as shoal
import torch

WHO, STEP = sys.argv[1], int(sys.argv[2])

job = shoal.init()
model = torch.nn.Linear(4, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(12000, 4), torch.randn(12000, 1))
mine = 0
for _ in job.epochs(1):
    for x, y in job.loader(data, batch_size=12):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.05)
        mine += 1
        is_last = job.world_size > 1 and job.rank == job.world_size - 1
        if mine == STEP and (WHO == "all" or is_last):
            os.kill(os.getpid(), signal.SIGSEGV)
