"""Compares checkpoints with torch.distributed.checkpoint in interleaved runs; prints a table of medians.

usage: PYTHON_WITH_TORCH tests/peers/checkpoints.py [ROUNDS [MIB]]     (from the root)
Both: two ranks save a Llama-shaped state with AdamW in f32, each tensor sharded by rows, to the same disk, and load it again
from the page cache into touched memory. torch: DTensors on Gloo, one process per rank with one thread; `torch` is its default,
`torch, no fsync` has sync_files=False; no checksums. Its `load-rows` loads the shards as saved. Phalanx: `cargo bench --bench
checkpoint`, fsync and checksums; its `load-rows` reshards the rows for three ranks. `load-columns` reshards in both. Training
waits for the whole save in `dcp.save`, for the call in `dcp.async_save`, and for `stall` in Phalanx. A durable save ends when
all ranks have saved: in Phalanx after the copy and the background save, in `async_save` after the call and its future. Both
reuse the memory of an earlier save for the copy (`first`: the first save).
"""
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
N_RANKS = 2
LAYER = [(1024, 1024)] * 4 + [(2816, 1024)] * 2 + [(1024, 2816)] + [(1024, 1)] * 2


def torch_rank(rank, folder, mib, no_fsync):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=N_RANKS)
    mesh = init_device_mesh("cpu", (N_RANKS,))
    layer_bytes = sum(3 * 4 * rows * columns for rows, columns in LAYER)

    def state(dim, value):
        tensors = {}
        for layer in range(-(-(mib << 20) // layer_bytes)):
            for i, shape in enumerate(LAYER):
                placement = [Shard(dim if shape[dim] > 1 else 0)]
                local = list(shape)
                local[placement[0].dim] //= N_RANKS
                for kind in ("weight", "exp_avg", "exp_avg_sq"):
                    part = torch.full(local, value)
                    tensors[f"layers.{layer}.{i}.{kind}"] = DTensor.from_local(part, mesh, placement)
        return tensors

    def timed(what, act):
        dist.barrier()
        start = time.perf_counter()
        act()
        dist.barrier()
        if rank == 0:
            print(what, f"{time.perf_counter() - start:.4f}", flush=True)

    def timed_async(first):
        """Times a background save and removes it."""
        path = f"{folder}/async"
        dist.barrier()
        start = time.perf_counter()
        future = dcp.async_save(saved, storage_writer=dcp.FileSystemWriter(path, sync_files=not no_fsync), async_stager=stager)
        dist.barrier()
        waited = time.perf_counter() - start
        getattr(future, "upload_completion", future).result()
        dist.barrier()
        if rank == 0:
            print("async-first" if first else "async-stall", f"{waited:.4f}")
            print("async-save-first" if first else "async-save", f"{time.perf_counter() - start:.4f}", flush=True)
            shutil.rmtree(path)
        dist.barrier()

    where = f"{folder}/checkpoint"
    storage = dcp.FileSystemWriter(where, sync_files=not no_fsync)
    saved = state(0, 1.0 + rank)
    # Reused for all saves, with its memory. Pinned memory needs a GPU.
    options = {"use_pinned_memory": False, "use_shared_memory": False, "use_async_staging": False, "use_non_blocking_copy": False}
    stager = DefaultStager(StagingOptions(**options))
    for first in (True, False):
        timed_async(first)
    timed("save", lambda: dcp.save(saved, storage_writer=storage))
    for what, dim in (("load-rows", 0), ("load-columns", 1)):
        loaded = state(dim, 0.0)
        timed(what, lambda: dcp.load(loaded, checkpoint_id=where))
        assert all(bool((part.to_local() > 0).all()) for part in loaded.values())
    dist.destroy_process_group()


def torch(folder, mib, *, no_fsync=False):
    script = [sys.executable, __file__, "torch", str(folder), str(mib), json.dumps(no_fsync)]
    return figures(script)


def phalanx(folder, mib):
    return figures(["cargo", "bench", "-q", "-p", "phalanx-storage", "--bench", "checkpoint", "--", str(folder), str(mib)])


def figures(command):
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    words = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: float(line[1]) for line in words if len(line) == 2}


def compare(rounds, mib):
    runs = {"torch": torch, "torch, no fsync": lambda *at: torch(*at, no_fsync=True), "phalanx": phalanx}
    found = {name: [] for name in runs}
    (ROOT / "target").mkdir(exist_ok=True)
    for _ in range(rounds):
        for name, run in runs.items():
            folder = pathlib.Path(tempfile.mkdtemp(dir=ROOT / "target"))
            subprocess.run(["sync"], check=True)
            found[name].append(run(folder, mib))
            shutil.rmtree(folder)
    gb = found["phalanx"][0]["bytes"] / 1e9

    def of(name, *whats):
        return [sum(run[what] for what in whats) / gb for run in found[name]]

    rows = [
        ("durable save, copy included", ("phalanx", "stall", "save"), ("torch", "save")),
        ("the same, torch async_save", ("phalanx", "stall", "save"), ("torch", "async-save")),
        ("the same, torch's not durable", ("phalanx", "stall", "save"), ("torch, no fsync", "save")),
        ("the same, async_save not durable", ("phalanx", "stall", "save"), ("torch, no fsync", "async-save")),
        ("load-rows", ("phalanx", "load-rows"), ("torch", "load-rows")),
        ("load-columns", ("phalanx", "load-columns"), ("torch", "load-columns")),
        ("training waits, torch async_save", ("phalanx", "stall"), ("torch", "async-stall")),
        ("training waits, first save, torch async_save", ("phalanx", "first"), ("torch", "async-first")),
        ("training waits", ("phalanx", "stall"), ("torch", "save")),
        ("training waits, torch's not durable", ("phalanx", "stall"), ("torch, no fsync", "save")),
        ("training waits, first save", ("phalanx", "first"), ("torch", "save")),
    ]
    print(f"{gb:.2f} GB, {rounds} rounds")
    print("| what | phalanx s/GB | rounds | torch s/GB | rounds | torch / phalanx |")
    print("|---|--:|---|--:|---|--:|")
    for what, ours, theirs in rows:
        ours, theirs = of(*ours), of(*theirs)
        shown = [" ".join(f"{x:.3f}" for x in times) for times in (ours, theirs)]
        a, b = statistics.median(ours), statistics.median(theirs)
        print(f"| {what} | {a:.3f} | {shown[0]} | {b:.3f} | {shown[1]} | {b / a:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["torch"]:
        import torch.multiprocessing as mp

        mp.spawn(torch_rank, (sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])), nprocs=N_RANKS)
    else:
        compare(*(int(arg) for arg in sys.argv[1:] or ("5",)), *([] if len(sys.argv) > 2 else [1024]))
