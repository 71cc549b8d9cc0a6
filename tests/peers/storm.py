#!/usr/bin/env python3
"""Injects random faults into jobs over several nodes and compares the weights with those of an undisturbed run.

    python3 tests/peers/storm.py target/release/phalanx --seeds 0..20

A seed determines a job (a mesh, nodes with and without spare processes, `rest_bytes_max` and `replace_patience`) and its
faults: ranks are killed, one or two at a time, or stopped; nodes and the coordinator are killed and restarted. The seed fixes
the faults and the pauses between them, but not the steps at which they happen. A job fails if its weights differ, it does not
end, or one of its processes panics; the script then keeps and names its folder. The simulator (`phalanx-chaos`) tests the same
state machines more often and replays seeds; storms test the layers below. Needs only Python's standard library.
"""

import glob
import os
import random
import shutil
import signal
import sys
import time

from faults import Cluster, until
from job import Job, arguments, ranks

MORE = """\
reproducible: true
warmup_steps: 1
"""
N_MICROBATCHES = 12


def add(parser):
    parser.add_argument("--seeds", default="0..20", help="first..end, without the end")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--faults", type=int, default=8)


def main():
    args, overrides = arguments(__doc__, add)
    first, _, end = args.seeds.partition("..")
    failed, undisturbed = [], {}
    for seed in range(int(first), int(end or int(first) + 1)):
        began = time.monotonic()
        what, wrong = storm(args, overrides, seed, undisturbed)
        print(f"seed {seed}: {what}; {time.monotonic() - began:.0f} s: {wrong or 'equal weights'}", flush=True)
        failed += [seed] if wrong else []
    print(f"{len(failed)} failed: {failed}" if failed else "all weights equal those of undisturbed runs")
    sys.exit(1 if failed else 0)


def storm(args, overrides, seed, undisturbed):
    rng = random.Random(seed)
    tp, dp_shard, dp_replicate = rng.choice([1, 1, 1, 2]), rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 2])
    if tp * dp_shard * dp_replicate == 1:
        # A single rank has no peer with its state, so it would restart from the beginning until the job gives up.
        dp_replicate = 2
    n_ranks = tp * dp_shard * dp_replicate
    n_nodes = rng.choice([n for n in (1, 2, 3) if n <= n_ranks])
    n_each = -(-n_ranks // n_nodes) + rng.choice([0, 0, 1])
    mesh = {"tensor_parallel_size": tp, "dp_shard_size": dp_shard, "dp_replicate_size": dp_replicate}
    more = {"elastic.rest_bytes_max": rng.choice([0, 0, 1 << 25]), "elastic.replace_patience": rng.choice([0, 0, 0.5])}
    words = [word for key, value in {**mesh, **more}.items() for word in (f"--{key}", str(value))]
    words += ["--max_steps", str(args.steps), "--microbatches_per_step", str(N_MICROBATCHES), *overrides]
    what = f"tp {tp} x dp_shard {dp_shard} x dp_replicate {dp_replicate} on {n_nodes} x {n_each}, {more}"
    with Job(args.phalanx, hidden_size=32, n_layers=2, sequence_len=32, more=MORE) as job:
        if tp not in undisturbed:
            job.run(*words, *[w for key in ("dp_shard_size", "dp_replicate_size") for w in (f"--{key}", "1")], "--output_dir", "undisturbed")
            undisturbed[tp] = weights(job, "undisturbed")
        with Cluster(job, args.phalanx, words, n_nodes, n_each) as cluster:
            try:
                until("a first step", lambda: len(job.steps_ms()) > 3)
                for _ in range(args.faults):
                    what += " · " + inject(cluster, rng)
                    time.sleep(rng.choice([0.02, 0.1, 0.3, 1.0, 1.0, 2.0]))
                until("the end", lambda: cluster.coordinator.poll() is not None, 600)
                wrong = None if weights(job, "out") == undisturbed[tp] else "the weights differ"
            except (AssertionError, FileNotFoundError) as error:
                wrong = str(error)
        logs = [open(name).read() for name in glob.glob(f"{job.folder}/*.log")]
        wrong = "a process panicked" if any("panicked" in log for log in logs) else wrong
        if wrong:
            kept = f"{job.folder}-seed-{seed}"
            shutil.copytree(job.folder, kept)
            wrong += f"; see {kept}"
    return what, wrong


def weights(job, out):
    with open(f"{job.folder}/{out}/model/model.safetensors", "rb") as file:
        return file.read()


def inject(cluster, rng):
    """Injects a random fault and returns its name."""
    n_nodes = len(cluster.nodes)
    node = rng.randrange(n_nodes)
    how = rng.choice(["kill", "kill", "kill", "kill", "two", "stop", "node", "coordinator"])
    if how == "coordinator":
        cluster.coordinator.kill()
        if cluster.coordinator.wait() == 0:
            return "no fault, since the job had ended"
        time.sleep(rng.choice([0, 0.5]))
        cluster.coordinate()
    elif how == "node":
        cluster.nodes[node].kill()
        cluster.nodes[node].wait()
        time.sleep(rng.choice([0, 0.5, 1.5]))
        cluster.add(node)
    else:
        for pid in rng.sample(here := ranks(cluster.nodes[node].pid), min(len(here), 2 if how == "two" else 1)):
            try:
                os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            except ProcessLookupError:
                pass
    return how if how == "coordinator" else f"{how} {node}"


if __name__ == "__main__":
    main()
