#!/usr/bin/env python3
"""Overhead of elasticity while nothing fails: processor time of all threads of a job that do not compute.

    python3 tests/peers/overhead.py target/release/phalanx --seconds 20 --dp_replicate_size 2

Trains a model of 5 M parameters on generated text and compares the processor time of coordinator, supervisor, heartbeats and
desired states with that of the device threads, from the kernel's accounting. On a shared machine wall-clock times of two runs
differ by more than this overhead (`cargo bench -p phalanx --bench elasticity` compares them). Needs only Python's standard
library and Linux.
"""

import os
import subprocess
import time

from job import Job, arguments


def processor_seconds(launcher):
    """Thread name -> seconds, over the launcher and its ranks."""
    found = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True)
    seconds = {}
    for pid in [launcher, *map(int, found.stdout.split())]:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/comm") as name, open(f"/proc/{pid}/task/{thread}/schedstat") as stat:
                key = "coordinator and supervisor" if pid == launcher else name.read().strip()
                seconds[key] = seconds.get(key, 0) + int(stat.read().split()[0]) / 1e9
    return seconds


def main():
    args, overrides = arguments(__doc__, lambda parser: parser.add_argument("--seconds", type=float, default=20))
    with Job(args.phalanx, micro_batch_size=2) as job:
        run = job.start("--max_steps", "1000000", *overrides)

        def n_steps():
            return len(job.steps_ms())

        try:
            while n_steps() < 5:
                assert run.poll() is None, "the run has ended"
                time.sleep(0.05)
            before, first, begin = processor_seconds(run.pid), n_steps(), time.monotonic()
            time.sleep(args.seconds)
            after, last, passed = processor_seconds(run.pid), n_steps(), time.monotonic() - begin
        finally:
            run.kill()
            run.wait()
    used = {name: after[name] - before.get(name, 0) for name in after}
    devices = used.pop("device")
    print(f"{last - first} steps of {passed / (last - first) * 1e3:.1f} ms; devices computed {devices:.2f} s")
    for name, seconds in sorted(used.items(), key=lambda item: -item[1]):
        print(f"{name:28} {seconds / (last - first) * 1e3:6.2f} ms a step, {100 * seconds / passed:.2f} % of a core")
    print(f"all other threads            {100 * sum(used.values()) / devices:.2f} % of the devices' time")


if __name__ == "__main__":
    main()
