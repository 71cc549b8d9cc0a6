"""One rank of a small PyTorch job for torchrun_kills.py and torchft_kills.py, which kill it.

usage: torch_worker.py torchrun|torchft FOLDER STEPS SAVE_STEPS
A model with the same number of parameters as that of kills.py (some 270 K) on data generated from the step; Gloo averages the
gradients. Rank 0 under torchrun, and every replica under TorchFT, writes a line for each step: its number, the monotonic time,
and the number of ranks that took part. Under torchrun rank 0 saves every SAVE_STEPS steps, and all ranks resume from the last
save; under TorchFT a restarted rank fetches its state from a peer.
"""
import datetime
import os
import sys
import time

import torch
from torch import nn

HOW, FOLDER, STEPS, SAVE_STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
BATCH, TOKENS, WIDTH, VOCABULARY = 2, 128, 64, 512


def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 4), nn.Linear(WIDTH, VOCABULARY))


def loss_of(module, step, rank):
    generator = torch.Generator().manual_seed(1_000_000 * rank + step)
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    return nn.functional.cross_entropy(module(ids).view(-1, VOCABULARY), ids.view(-1))


def record_step(name, step, n_ranks):
    with open(f"{FOLDER}/{name}", "a") as file:
        file.write(f"{step} {time.monotonic():.4f} {n_ranks}\n")


def save(state):
    torch.save(state, f"{FOLDER}/saved.new")
    os.replace(f"{FOLDER}/saved.new", f"{FOLDER}/saved")


def torchrun():
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, n_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    done = 0
    if os.path.exists(f"{FOLDER}/saved"):
        saved = torch.load(f"{FOLDER}/saved")
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    while done < STEPS:
        optimizer.zero_grad()
        loss_of(module, done, rank).backward()
        optimizer.step()
        done += 1
        if rank == 0:
            record_step("steps", done, n_ranks)
            if done % SAVE_STEPS == 0:
                save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": done})


def torchft():
    from torchft import Manager, Optimizer, ProcessGroupGloo

    replica = int(os.environ["REPLICA"])
    # The store that torchrun would provide for the ranks of a replica; it ends with the process.
    port = int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    module = model()
    inner = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def load(state):
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=datetime.timedelta(seconds=10),
    )
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        before = manager.current_step()
        optimizer.zero_grad()
        loss_of(module, before, replica).backward()
        # TorchFT's DistributedDataParallel fails after the loss of a peer with this PyTorch (`assert fut._fut` in ddp.py).
        flat = torch.cat([parameter.grad.view(-1) for parameter in module.parameters()])
        manager.allreduce(flat).wait()
        for parameter, grad in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()])):
            parameter.grad.copy_(grad.view_as(parameter))
        optimizer.step()
        if manager.current_step() > before:
            record_step(f"steps-{replica}", manager.current_step(), manager.num_participants())
    manager.shutdown()
    del store


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"torchrun": torchrun, "torchft": torchft}[HOW]()
