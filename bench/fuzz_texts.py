"""Sound texts of every kind that is read from outside."""

import json
from typing import Any

from manyhands.cluster.agents.protocol import Alive, FilePiece, LogText, WorkersEnded, WorkersStarted
from manyhands.cluster.messages import Message, RequestFailed
from manyhands.core.records import Failure

JOB = """
recipe = "folder"
data = "pets"
[model]
name = "resnet18"
[train]
epochs = 3
batch = 64
lr = 0.1
micro_batch = 0
schedule = "cosine"
[cluster]
hosts = ["n1:2", "n2"]
processes = 2
[parallel]
mode = "semi"
mesh = "dp=2,tp=2"
pin = ["fc=o@tp"]
[run]
out = "runs/x"
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 4
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
gpu_ids: 0,1
mixed_precision: bf16
deepspeed_config:
  deepspeed_hostfile: hosts
"""
LAUNCH = """{ // VS Code
 "version": "0.2.0",
 "configurations": [{"name": "x", "type": "debugpy", "module": "torch.distributed.run",
  "args": ["--nnodes=2", "--nproc_per_node=4", "--node_rank=0", "--master_addr=10.0.0.1", "--master_port=29500",
   "train.py",],
  "env": {"MASTER_ADDR": "10.0.0.1"}}]
}
"""
SLURM = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --nodelist=n[1-2],m03
#SBATCH --gres=gpu:4
srun manyhands train
"""
CLUSTERS = {
    "hostfile": "n1 slots=4 max_slots=8\nuser@n2 slots=4 # more\n10.0.0.3\n[fd00::1]:2\n",
    "ranks.json": json.dumps(
        {
            "version": "1.0",
            "server_count": "2",
            "status": "completed",
            "server_list": [
                {
                    "server_id": f"10.0.0.{n}",
                    "host_ip": "reserve",
                    "device": [
                        {"device_id": str(d), "device_ip": f"192.100.{n}.{d}", "rank_id": str(2 * n + d)}
                        for d in range(2)
                    ],
                }
                for n in range(2)
            ],
        }
    ),
    "accelerate.yaml": ACCELERATE,
    "launch.json": LAUNCH,
    "job.sh": SLURM,
    "torchrun.sh": "torchrun --nnodes=2 --nproc-per-node=4 --node-rank=0 --master-addr=n1 --master-port 295 a.py\n",
    "msrun.sh": "msrun --worker_num=8 --local_worker_num=4 --master_addr=10.0.0.1 --master_port=8118 train.py\n",
}
PLACES = {
    "slurm": {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "12345",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "CUDA_VISIBLE_DEVICES": "0,1",
    },
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_RANK": "0",
    },
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    },
    "ascend": {"RANK_TABLE_FILE": "ranks.json", "RANK_ID": "1", "DEVICE_ID": "1", "RANK_SIZE": "4"},
    "kubeflow": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "n1",
        "PET_MASTER_PORT": "29500",
    },
}
AGENT: tuple[Message, ...] = (
    Alive(),
    WorkersStarted(0, [7]),
    FilePiece("metrics.jsonl", "x\n"),
    LogText("x", 3),
    RequestFailed("no", "n1", ("x",)),
    WorkersEnded(
        {0: {"status": "finished"}},
        {1: 3},
        {1: "x"},
        records=[Failure(time=1.0, rank=1, host="n1", pid=3, error="E", what="w", mend=["m"])],
        ended_by="itself",
    ),
)


STORE: tuple[dict[str, Any], ...] = (
    {"host": "n1", "machine": "n1 x", "pid": 7, "addresses": ["10.0.0.1"], "size": 2, "digest": "d", "torch": "2.9"},
    {"rank": 1, "host": "n1", "pid": 7},
    {"rank": 1, "host": "n1", "what": "no memory"},
)
FLAGS = 'data=pets\ntrain.lr=0.1\ntrain.betas=[0.9, 0.99]\nmodel.name="resnet18"\nrun.out=x\nparallel.pin=["a=n"]\n'
ANY = json.dumps({"a": [1, 2.5, {"b": "text", "c": None}], "d.e": [[], {}]})
