"""All-reduce of float32 with torch's Gloo between processes of this machine.

Usage: python gloo_allreduce.py RANKS BYTES [BYTES ...]
Prints one line per size: ranks, bytes, median microseconds at rank 0.
The counterpart is `cargo bench --bench collective`; both time whole calls that start when all ranks are ready.
"""

import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank: int, size: int, store: str, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for n_bytes in sizes:
        tensor = torch.zeros(n_bytes // 4)
        n_calls = 10 if n_bytes > 1 << 20 else 500
        times = []
        for call in range(n_calls + 3):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if call >= 3:
                times.append(time.perf_counter() - start)
        if rank == 0:
            print(f"gloo {size} {n_bytes} {statistics.median(times) * 1e6:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, sizes = int(sys.argv[1]), [int(x) for x in sys.argv[2:]]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, f"{folder}/store", sizes), nprocs=ranks)
