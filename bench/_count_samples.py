"""Counts in the weights how often each sample was used: each use adds one to the sample's own weight.

    _count_samples.py SAMPLES BATCH EPOCHS STEP_S FILE

Each step takes STEP_S seconds divided by the workers, until FILE.hurry exists. Writes the different counts to FILE:
`[EPOCHS]` if every sample was used once per epoch.
"""

import json
import os
import sys
import time

import shoal.torch as shoal
import torch

SAMPLES, BATCH, EPOCHS = map(int, sys.argv[1:4])
STEP_S, FILE = float(sys.argv[4]), sys.argv[5]

job = shoal.init()
model = torch.nn.Linear(SAMPLES, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=BATCH))
loader = job.loader(torch.utils.data.TensorDataset(torch.eye(SAMPLES)), batch_size=BATCH)
for _ in job.epochs(EPOCHS):
    for (x,) in loader:
        optimizer.zero_grad()
        (-model(x).mean()).backward()
        if not os.path.exists(f"{FILE}.hurry"):
            time.sleep(STEP_S / job.world_size)
        optimizer.step()
if job.is_main:
    counts = sorted({round(count, 2) for count in model.weight.detach().flatten().tolist()})
    with open(f"{FILE}.part", "w") as file:
        json.dump(counts, file)
    os.replace(f"{FILE}.part", FILE)
