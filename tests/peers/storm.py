#!/usr/bin/env python3
"""Injects faults into jobs over several nodes at random moments in random ways, and looks whether the weights are those of an undisturbed run.

    python3 tests/peers/storm.py target/release/phalanx --seeds 0..20

Each seed is a job: a mesh, nodes (some with processes to spare), what is fetched at rest and how long a successor is waited
for; and a storm: ranks are killed, several at once or one after the other, ranks are stopped, nodes killed and started again,
the coordinator too. A seed decides what happens and after which pause, though not at which step. A job fails when its weights
differ, when it does not come to its end, or when any process of it panics; then its folder is kept and named. The simulator
(`phalanx-chaos`) tests the same machines more often and can be replayed; this is for what lies below them. Needs Python's
standard library only.
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
    parser.add_argument("--seeds", default="0..20", help="first..behind the last")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--faults", type=int, default=8)


def main():
    args, overrides = arguments(__doc__, add)
    first, _, end = args.seeds.partition("..")
    failed, peace = [], {}
    for seed in range(int(first), int(end or int(first) + 1)):
        began = time.monotonic()
        what, wrong = storm(args, overrides, seed, peace)
        print(f"seed {seed}: {what}; {time.monotonic() - began:.0f} s: {wrong or 'the weights of peace'}", flush=True)
        failed += [seed] if wrong else []
    print(f"{len(failed)} failed: {failed}" if failed else "all have the weights of peace")
    sys.exit(1 if failed else 0)


def storm(args, overrides, seed, peace):
    rng = random.Random(seed)
    tp, dp_shard, dp_replicate = rng.choice([1, 1, 1, 2]), rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 2])
    if tp * dp_shard * dp_replicate == 1:
        # Nobody could have what a single one loses, so that it would begin again until it is given up.
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
        if tp not in peace:
            job.run(*words, *[w for key in ("dp_shard_size", "dp_replicate_size") for w in (f"--{key}", "1")], "--output_dir", "peace")
            peace[tp] = weights(job, "peace")
        with Cluster(job, args.phalanx, words, n_nodes, n_each) as cluster:
            try:
                until("a first step", lambda: len(job.steps_ms()) > 3)
                for _ in range(args.faults):
                    what += " · " + inject(cluster, rng)
                    time.sleep(rng.choice([0.02, 0.1, 0.3, 1.0, 1.0, 2.0]))
                until("the end", lambda: cluster.coordinator.poll() is not None, 600)
                wrong = None if weights(job, "out") == peace[tp] else "other weights"
            except (AssertionError, FileNotFoundError) as error:
                wrong = str(error)
        logs = [open(name).read() for name in glob.glob(f"{job.folder}/*.log")]
        wrong = "a panic" if any("panicked" in log for log in logs) else wrong
        if wrong:
            kept = f"{job.folder}-seed-{seed}"
            shutil.copytree(job.folder, kept)
            wrong += f"; see {kept}"
    return what, wrong


def weights(job, out):
    with open(f"{job.folder}/{out}/model/model.safetensors", "rb") as file:
        return file.read()


def inject(cluster, rng):
    """What was done."""
    n_nodes = len(cluster.nodes)
    node = rng.randrange(n_nodes)
    how = rng.choice(["kill", "kill", "kill", "kill", "two", "stop", "node", "coordinator"])
    if how == "coordinator":
        cluster.coordinator.kill()
        if cluster.coordinator.wait() == 0:
            return "nothing, since the job was over"
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
