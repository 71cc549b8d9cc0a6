#!/usr/bin/env python3
"""Injects faults into a `phalanx` job over several nodes and measures the time until steps continue.

    python3 tests/peers/faults.py target/release/phalanx --rounds 5

A coordinator and two nodes (one rank each, dp_shard 2: no replica) are processes of this machine. Each round kills a rank,
stops a rank, kills and restarts a node with its rank, kills and restarts a supervisor alone, and kills and restarts the
coordinator. Prints for each fault the median and the longest time to the second reported step after it (for the coordinator:
the longest gap between two steps until it is back), and the hashes of the exported weights and of those of one rank without
faults. Needs only Python's standard library.
"""

import hashlib
import os
import re
import signal
import statistics
import subprocess
import time

from job import Job, arguments, ranks

MORE = """\
reproducible: true
warmup_steps: 1
"""
PATIENCE_S = 60


def add(parser):
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2500)


class Cluster:
    """A coordinator and its nodes. Killed on exit."""

    def __init__(self, job, phalanx, overrides, n_nodes=2, n_each=1):
        self.job, self.phalanx, self.overrides = job, phalanx, overrides
        self.n_nodes, self.n_each = n_nodes, n_each
        self.nodes, self.address = [], "127.0.0.1:0"

    def __enter__(self):
        self.coordinate()
        found = lambda: re.search(r"--join (\S+)", open(f"{self.job.folder}/coordinator.log").read())
        until("a join string", found)
        self.join = found()[1]
        self.address = self.join.split("@")[1]
        for i in range(self.n_nodes):
            self.add(i)
        return self

    def __exit__(self, *_):
        for process in [self.coordinator, *self.nodes]:
            process.kill()
            process.wait()

    def spawn(self, log, *words):
        with open(f"{self.job.folder}/{log}", "a") as file:
            return subprocess.Popen([self.phalanx, *words], cwd=self.job.folder, stdout=file, stderr=file)

    def coordinate(self):
        words = ["coordinator", "--listen", self.address, "job.yaml", *self.overrides]
        self.coordinator = self.spawn("coordinator.log", *words)

    def add(self, i):
        node = self.spawn(f"node{i}.log", "node", "--join", self.join, "--dir", f"node{i}", "--ranks", str(self.n_each))
        self.nodes[i:i + 1] = [node]

    def rank(self, i):
        until("a rank", lambda: ranks(self.nodes[i].pid))
        return ranks(self.nodes[i].pid)[0]


def until(what, is_so, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"timeout while waiting for {what}"
        time.sleep(0.002)


def kill_rank(cluster):
    os.kill(cluster.rank(0), signal.SIGKILL)


def stop_rank(cluster):
    os.kill(cluster.rank(1), signal.SIGSTOP)


def kill_supervisor(cluster):
    cluster.nodes[1].kill()
    cluster.nodes[1].wait()
    cluster.add(1)


def kill_node(cluster):
    rank = cluster.rank(1)
    os.kill(rank, signal.SIGKILL)
    kill_supervisor(cluster)


FAULTS = {
    "kill -9 of a rank": kill_rank,
    "SIGSTOP of a rank": stop_rank,
    "kill -9 of a node and its rank; restarted": kill_node,
    "kill -9 of a supervisor alone; restarted": kill_supervisor,
}
COORDINATOR = "kill -9 of the coordinator, restarted after 1 s"


def main():
    args, overrides = arguments(__doc__, add)
    with Job(args.phalanx, hidden_size=64, n_layers=4, micro_batch_size=2, more=MORE) as job:
        n_steps = lambda: len(job.steps_ms())

        def weights(out):
            with open(f"{job.folder}/{out}/model/model.safetensors", "rb") as file:
                return hashlib.sha256(file.read()).hexdigest()[:16]

        steps = ["--max_steps", str(args.steps)]
        times = {what: [] for what in [*FAULTS, COORDINATOR]}
        with Cluster(job, args.phalanx, [*steps, "--dp_shard_size", "2", *overrides]) as cluster:
            until("a first step", lambda: n_steps() > 10)
            for _ in range(args.rounds):
                for what, inject in FAULTS.items():
                    before, begin = n_steps(), time.monotonic()
                    inject(cluster)
                    until("a step", lambda: n_steps() >= before + 2)
                    times[what].append(time.monotonic() - begin)
                    # Before the next fault both ranks train, and shadows are complete.
                    before = n_steps()
                    until("a step", lambda: n_steps() >= before + 30)
                times[COORDINATOR].append(without_coordinator(cluster, n_steps))
            until("the end", lambda: cluster.coordinator.poll() is not None, 10 * PATIENCE_S)
        for what, values in times.items():
            print(f"{what}: median {statistics.median(values):.2f} s, max {max(values):.2f} s")
        job.run(*steps, "--output_dir", "straight")
        print("weights", weights("out"), "of one rank without faults", weights("straight"))


def without_coordinator(cluster, n_steps):
    cluster.coordinator.kill()
    cluster.coordinator.wait()
    last, seen, longest, began = time.monotonic(), n_steps(), 0, time.monotonic()
    is_back = False
    while time.monotonic() < began + 2:
        if not is_back and time.monotonic() > began + 1:
            cluster.coordinate()
            is_back = True
        if n_steps() > seen:
            longest = max(longest, time.monotonic() - last)
            last, seen = time.monotonic(), n_steps()
        time.sleep(0.002)
    return longest


if __name__ == "__main__":
    main()
