"""A small sample of each published format, and random damage to files."""

from __future__ import annotations

import json
from collections.abc import Callable

from hypothesis import strategies as st

from shoal.core.errors import InputError
from shoal.core.profile import Profile

ONE = {"net": Profile.of("net", {1: 0.5, 2: 0.25, 8: 0.1})}

PHILLY_JSON = [
    {  # two attempts: the size of the first, the time of both
        "jobid": "a", "user": "ann", "vc": "x", "status": "Pass", "submitted_time": "2017-10-09 07:00:00",
        "attempts": [
            {"start_time": "2017-10-09 07:00:10", "end_time": "2017-10-09 07:01:10",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]},
            {"start_time": "2017-10-09 07:02:00", "end_time": "2017-10-09 07:02:30",
             "detail": [{"ip": "m2", "gpus": ["gpu0"]}]},
        ],
    },
    {"jobid": "b", "user": "bob", "vc": "y", "status": "Killed", "submitted_time": "2017-10-09 06:59:00",
     "attempts": []},
    {"jobid": "c", "user": "bob", "vc": "y", "status": "Failed", "submitted_time": "2017-10-09 06:00:00",
     "attempts": [{"start_time": "2017-10-09 06:00:10", "end_time": None,
                   "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},
    {"jobid": "d", "user": "ann", "vc": "y", "status": "Pass", "submitted_time": "2017-10-09 06:58:00",
     "attempts": [{"start_time": "2017-10-09 06:58:00", "end_time": "2017-10-09 06:58:20",
                   "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},
]  # fmt: skip

SAMPLES: dict[str, str] = {
    "philly": json.dumps(PHILLY_JSON, indent=1),
    "philly-csv": (
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:00:00,90.0,2,180.0,x\n"
        "2017-10-09 06:58:00,20.0,1,20.0,y\n\n"
    ),
    "helios": (
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "7,ann,y,1,4,1,COMPLETED,2020-06-09 18:58:00,2020-06-09 18:58:00,2020-06-09 18:58:20,20,0\n"
        "8,bob,y,0,16,1,COMPLETED,2020-06-09 18:59:00,2020-06-09 18:59:00,2020-06-09 19:59:00,3600,0\n"
        "9,ann,x,2,8,1,CANCELLED,2020-06-09 19:00:00,2020-06-09 19:10:00,2020-06-09 19:11:30,90,600\n"
    ),
    "alibaba-pai": (
        "j1,worker,1.0,Terminated,1000.0,1020.0,600.0,29.3,50.0,V100\n"
        "j2,ps,1.0,Terminated,1100.0,1230.0,600.0,29.3,,\n"
        "j2,worker,2.0,Terminated,1120.0,1210.0,600.0,29.3,100.0,T4\n"
        "j3,tensorflow,1.0,Running,1300.0,,600.0,29.3,100.0,MISC\n"
        "j4,tensorflow,1.0,Terminated,1300.0,1400.0,600.0,29.3,,\n"
    ),
    "gavel": (
        'net\tpython main.py --name "x\t--steps\t1\t40\t5.000000\t1\n'
        "net\tpython main.py\t--steps\t1\t360\t125.000000\t2\n"
        "net\tpython main.py\t--steps\t0\t99\t130.000000\t0\n"
    ),
    "tiresias": (
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
        "0,1,30,606,net,20,30\n1,2,150,133,net,90,23\n"
    ),
    "elasticflow": (
        "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n"
        "0,30,606,net,900,64,1,20\n1,150,133,net,900,64,2,90\n"
    ),
}

PIECES = [
    b"",
    b",",
    b"\t",
    b'"',
    b"\n",
    b"\r",
    b"-",
    b"nan",
    b"1e400",
    b"{",
    b"]",
    b"null",
    b"\xff",
    b"\x0b",
    b"9" * 30,
]


def damage(content: bytearray, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 5))
        content[at : at + cut] = data.draw(st.sampled_from(PIECES) | st.binary(max_size=3))


def complaint(work: Callable[[], object]) -> str | None:
    try:
        work()
    except InputError as error:
        return str(error)
    return None
