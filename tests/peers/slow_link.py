#!/usr/bin/env python3
"""Restarts a lost machine behind a slow network and measures the other machine's longest gap between two steps.

    sudo python3 tests/peers/slow_link.py target/release/phalanx --joins 3 --rate 1gbit

The machines are two network namespaces with a limited rate between them (`tc`), one rank each, dp_replicate 2, 5 M parameters:
60 MB of state. Each join kills the second node and its rank; the first node continues alone; the second node restarts and
joins, alternately at rest and catching up while the first node trains (`elastic.rest_bytes_max`). Prints the longest gap
between two steps, from the first step alone to the first step together, and the median steps alone and together. Needs
Python's standard library, `ip`, `tc` and the right to create namespaces.
"""

import os
import re
import signal
import statistics
import subprocess
import time

from job import Job, arguments, ranks

MORE = "reproducible: true\nelastic: {{replace_patience: 0.0, rest_bytes_max: {rest_bytes_max}}}\n"
ADDRESSES = ["10.7.8.1", "10.7.8.2"]
PATIENCE_S = 120


def add(parser):
    parser.add_argument("--joins", type=int, default=3, help="number of joins of each kind")
    parser.add_argument("--rate", default="1gbit", help="rate of the network, in the syntax of `tc`")


class Network:
    """Two namespaces with a link between them. Removed on exit."""

    def __init__(self, rate):
        self.rate, self.names = rate, [f"phxs{os.getpid()}{i}" for i in range(2)]

    def __enter__(self):
        a, b = self.names
        run = lambda *words: subprocess.run(words, check=True)
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", a, "link", "add", "net", "type", "veth", "peer", "name", "net", "netns", b)
        for name, address in zip(self.names, ADDRESSES):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "net")
            run("ip", "-n", name, "link", "set", "net", "up")
            limit = ["tbf", "rate", self.rate, "burst", "512kb", "latency", "50ms"]
            run("tc", "-n", name, "qdisc", "add", "dev", "net", "root", *limit)
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name])


class Cluster:
    """A coordinator and two nodes on these machines. Killed on exit."""

    def __init__(self, job, network, phalanx, overrides):
        self.job, self.network, self.phalanx = job, network, phalanx
        words = ["coordinator", "--listen", f"{ADDRESSES[0]}:0", "job.yaml", *overrides]
        self.processes = {"coordinator": self.spawn(0, "coordinator", words)}

    def __enter__(self):
        found = lambda: re.search(r"--join (\S+)", open(f"{self.job.folder}/coordinator.log").read())
        until("a join string", found)
        self.join = found()[1]
        for i in range(2):
            self.add(i)
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def spawn(self, place, log, words):
        inside = ["ip", "netns", "exec", self.network.names[place], self.phalanx]
        with open(f"{self.job.folder}/{log}.log", "a") as file:
            return subprocess.Popen([*inside, *words], cwd=self.job.folder, stdout=file, stderr=file)

    def add(self, i):
        self.processes[i] = self.spawn(i, f"node{i}", ["node", "--join", self.join, "--dir", f"node{i}"])

    def kill(self, i):
        node = self.processes[i]
        for rank in ranks(node.pid):
            os.kill(rank, signal.SIGKILL)
        node.kill()
        node.wait()


def until(what, is_so, look=lambda: None):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"timeout while waiting for {what}"
        time.sleep(0.001)
        look()


def gaps(times, begin, end):
    return [b - a for a, b in zip(times, times[1:]) if begin <= a < end]


def join(args, network, overrides, rest_bytes_max):
    """The longest gap, the median step alone and the median step together, in seconds."""
    with Job(args.phalanx, more=MORE.format(rest_bytes_max=rest_bytes_max)) as job:
        mesh = ["--dp_replicate_size", "2", "--max_steps", "100000", *overrides]
        with Cluster(job, network, args.phalanx, mesh) as cluster:
            times = []
            look = lambda: times.extend([time.monotonic()] * (len(job.steps_ms()) - len(times)))
            worlds = lambda: [line for line in job.lines("out/events.jsonl") if line["event"] == "world"]
            alone = lambda world: world["mesh"]["dp_replicate"] == 1
            until("both", lambda: worlds() and not alone(worlds()[-1]), look)
            n_steps = len(times)
            until("steps together", lambda: len(times) >= n_steps + 6, look)
            cluster.kill(1)
            until("a world of one", lambda: alone(worlds()[-1]), look)
            n_steps = len(times)
            until("steps alone", lambda: len(times) >= n_steps + 8, look)
            first, before = times[n_steps + 1], len(times)
            of_alone = statistics.median(gaps(times, first, times[-1]))
            cluster.add(1)
            until("both again", lambda: not alone(worlds()[-1]), look)
            n_steps = len(times)
            until("steps together", lambda: len(times) >= n_steps + 8, look)
            together = statistics.median(gaps(times, times[n_steps + 1], times[-1]))
            return max(gaps(times, times[before - 1], times[n_steps])), of_alone, together


def main():
    args, overrides = arguments(__doc__, add)
    kinds = {"at rest": 1 << 40, "while the other one trains": 0}
    rows = {kind: [] for kind in kinds}
    with Network(args.rate) as network:
        for i in range(args.joins):
            for kind, rest_bytes_max in kinds.items():
                rows[kind].append(join(args, network, overrides, rest_bytes_max))
                longest, alone, together = rows[kind][-1]
                print(f"join {i + 1} {kind}: longest gap {longest:.3f} s; a step alone {alone:.3f} s, together {together:.3f} s", flush=True)
    for kind, values in rows.items():
        ratios = sorted(longest / together for longest, _, together in values)
        print(f"{kind}: longest gap median {statistics.median(ratios):.2f}, max {ratios[-1]:.2f} steps together")


if __name__ == "__main__":
    main()
