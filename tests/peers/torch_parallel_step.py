"""Two PyTorch processes timing the training step of the benchmark model under DDP or FSDP2 on Gloo; prints one JSON line.

usage: torch_parallel_step.py ddp|fsdp f32|bf16 STEPS
The model is that of torch_step.py; each rank has a batch of 4 x 256 and one thread.
"""
import json
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_step import B, S, V, Model


def rank_main(rank, world, mode, precision, steps, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    if mode == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    torch.manual_seed(rank)
    ids, labels = torch.randint(0, V, (B, S)), torch.randint(0, V, (B, S))
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(ids).view(-1, V).float(), labels.view(-1))
        loss.backward()
        opt.step()
        times.append((time.perf_counter() - start) * 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if rank == 0:
        print(json.dumps({"name": f"torch {torch.__version__} {mode} {precision}",
                          "median_ms": statistics.median(times[2:]), "peak_rss_mib": peak}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mode, precision, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    mp.spawn(rank_main, args=(2, mode, precision, steps, 29500 + os.getpid() % 2000), nprocs=2)
