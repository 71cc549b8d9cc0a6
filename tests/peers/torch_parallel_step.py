"""Times the training step of the benchmark model in PyTorch processes under DDP or FSDP2 on Gloo; prints one JSON line.

usage: torch_parallel_step.py RANKS eager|compile ddp|fsdp f32|bf16 STEPS START TEXT
The model is that of torch_step.py, and START a file of its weights. Each rank has one thread and a batch of 4 x 256 bytes of
TEXT, in the order of the file. DDP keeps its gradients in its buckets (`gradient_as_bucket_view`), which avoids a copy. `compile`
compiles the model under DDP and each block under FSDP2, as torchtitan does. A time is that from the end of a step to the end of the
next one; losses are averaged over the ranks after all steps.
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
IGNORED = -100


def labels_of(ids):
    """The next token of each position; the last one of a row predicts nothing."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)


def rank_main(rank, world, how, mode, precision, steps, port, start_file, text):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    tensors = safetensors_file.read(start_file)
    shape = Shape.of(tensors, seq_len=S)
    model = Model(shape)
    start_from(model, tensors)
    if how == "compile":
        for part in model.blocks if mode == "fsdp" else [model]:
            part.compile()
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
    ends, losses = [], []
    for ids in ids_of_steps[:, rank]:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(ids, labels_of(ids))
        loss.backward()
        opt.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    means = torch.tensor(losses) / world
    dist.all_reduce(means)
    if rank == 0:
        times = [(end - before) * 1e3 for before, end in zip(ends, ends[1:])]
        print(json.dumps({"name": f"torch {torch.__version__} {how} {mode} {precision}",
                          "median_ms": statistics.median(times[1:]), "losses": means.tolist()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    n_ranks, how, mode, precision, steps = int(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5])
    port = 29500 + os.getpid() % 2000
    mp.spawn(rank_main, args=(n_ranks, how, mode, precision, steps, port, *sys.argv[6:8]), nprocs=n_ranks)
