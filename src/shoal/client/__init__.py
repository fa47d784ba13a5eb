"""`shoal.client`: the commands of the command line as typed methods, for Python.

import shoal

with shoal.Client() as client:                       # the server of this machine
    job = client.submit(shoal.JobSpec(command=["python", "train.py"], workdir="/home/ada", gpus="1..8"))
    for line in client.follow_logs(job.id):          # continues over resizes, restarts and lost connections
        print(line.rank, line.text)
    print(client.job(job.id).state, client.why(job.id).sentence)
"""

from __future__ import annotations

from shoal.client.client import Client
from shoal.client.errors import ClientError

__all__ = ["Client", "ClientError"]
