"""Times the training step of the benchmark model in two PyTorch processes under DDP or FSDP2 on Gloo; prints one JSON line.

usage: torch_parallel_step.py ddp|fsdp f32|bf16 STEPS START TEXT
The model is that of torch_step.py, and START a file of its weights. Each rank has one thread and a batch of 4 x 256 bytes of
TEXT, in the order of the file. DDP keeps its gradients in its buckets (`gradient_as_bucket_view`), which avoids a copy.
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import safetensors_file
from torch_step import Model, Shape, optimizer, start_from

B, S = 4, 256


def rank_main(rank, world, mode, precision, steps, port, start_file, text):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    tensors = safetensors_file.read(start_file)
    shape = Shape.of(tensors, seq_len=S)
    model = Model(shape)
    start_from(model, tensors)
    if mode == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    opt = optimizer(model)
    with open(text, "rb") as file:
        # Phalanx's byte tokenizer starts a text with BOS.
        ids_of_steps = torch.tensor([256, *file.read(steps * world * B * S - 1)]).view(steps, world, B, S)
    times, losses = [], []
    for ids in ids_of_steps[:, rank]:
        dist.barrier()
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(ids)[:, :-1].reshape(-1, shape.vocabulary).float(), ids[:, 1:].reshape(-1))
        loss.backward()
        opt.step()
        times.append((time.perf_counter() - start) * 1e3)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    if rank == 0:
        print(json.dumps({"name": f"torch {torch.__version__} {mode} {precision}",
                          "median_ms": statistics.median(times[2:]), "losses": losses}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mode, precision, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    mp.spawn(rank_main, args=(2, mode, precision, steps, 29500 + os.getpid() % 2000, *sys.argv[4:6]), nprocs=2)
