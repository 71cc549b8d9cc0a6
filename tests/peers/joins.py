#!/usr/bin/env python3
"""Kills ranks whose successors join while the others train, and measures the gaps between steps.

    python3 tests/peers/joins.py target/release/phalanx --kills 5 --dp_replicate_size 2

Trains a model of 5 M parameters on generated text, without spare processes and without patience: the survivors shrink and
continue at once, and the successor joins later; with --catch-up it catches up while they train. Prints for each kill the
longest gap between two steps, from the survivors' first step alone to the first step together, and the times from the
successor's process start to its world and to its first step. The unit of the gap is the median step of the survivors alone,
from a separate run (--alone: its mesh). Needs only Python's standard library.
"""

import argparse
import os
import signal
import statistics
import subprocess
import time

from job import Job, arguments, ranks

MORE = """\
reproducible: true
elastic: {{replace_patience: 0.0, rest_bytes_max: {rest_bytes_max}}}
"""


def add(parser):
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--alone", default="--dp_replicate_size 1", help="the mesh of the survivors")
    parser.add_argument("--catch-up", action="store_true", help="the successor catches up while the others train")
    parser.add_argument("--between", type=int, default=6, help="steps between a join and the next kill")
    parser.add_argument("--log", type=argparse.FileType("w"), default=subprocess.DEVNULL, help="file for the run's output")


def main():
    args, overrides = arguments(__doc__, add)
    rest = 0 if args.catch_up else 1 << 40
    n_worlds = 3 if args.catch_up else 2
    with Job(args.phalanx, more=MORE.format(rest_bytes_max=rest)) as job:
        job.run("--max_steps", "14", "--output_dir", "alone", *args.alone.split(), stdout=args.log)
        alone = statistics.median(job.steps_ms("alone")[4:]) / 1e3
        run = job.start("--max_steps", "100000", *overrides, stdout=args.log)
        times = []

        def look():
            n_new = len(job.steps_ms()) - len(times)
            times.extend([time.monotonic()] * n_new)

        def until(is_so):
            while not is_so():
                assert run.poll() is None, "the run has ended"
                time.sleep(0.001)
                look()

        rows = []
        until(lambda: len(times) >= args.between)
        for n in range(args.kills):
            before, n_incidents = set(ranks(run.pid)), len(job.incidents())
            os.kill(max(before), signal.SIGKILL)
            killed = time.monotonic()
            until(lambda: set(ranks(run.pid)) - before)
            started = time.monotonic()
            until(lambda: len(job.incidents()) >= n_incidents + n_worlds)
            joined = time.monotonic()
            n_joined = len(times)
            until(lambda: len(times) >= n_joined + 1)
            first = time.monotonic()
            until(lambda: len(times) >= n_joined + args.between)
            # The gap with the kill belongs to the failure, not to the join.
            pairs = [(a, b) for a, b in zip(times, times[1:]) if a > killed and a <= first]
            longest = max((b - a for a, b in pairs), default=first - joined)
            together = statistics.median(b - a for a, b in zip(times[n_joined + 1 :], times[n_joined + 2 :]))
            rows.append((longest / alone, joined - started))
            healed = job.incidents()[n_incidents + n_worlds - 1]["phases_ms"]["heal"]
            print(f"join {n + 1}: longest gap {longest * 1e3:.0f} ms, a step alone {alone * 1e3:.0f} ms, together {together * 1e3:.0f} ms; "
                  f"from process start to its world {joined - started:.3f} s, to its first step {first - started:.3f} s; "
                  f"healed in {healed:.0f} ms", flush=True)
        run.kill()
        run.wait()
        gaps, starts = ([row[i] for row in rows] for i in (0, 1))
        print(f"longest gap: median {statistics.median(gaps):.2f}, max {max(gaps):.2f} steps of survivors alone")
        print(f"process start to its world: median {statistics.median(starts):.3f} s, max {max(starts):.3f} s")


if __name__ == "__main__":
    main()
