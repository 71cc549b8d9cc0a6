#!/usr/bin/env python3
"""Kills random rank processes of a `phalanx train` run and measures the time without a reported step.

    python3 tests/peers/kills.py target/release/phalanx --kills 20 --dp_shard_size 2 --elastic.spare_ranks 1

Trains a small model on generated text, with `reproducible`; prints one line per kill, then median and maximum of the time from
a kill to the first step computed after it, and the hash of the exported weights, which must equal that of a run with
`--kills 0`. Needs only Python's standard library.
"""

import hashlib
import os
import random
import signal
import time

from job import Job, arguments, ranks


def add(parser):
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=1)


def main():
    args, overrides = arguments(__doc__, add)
    dice = random.Random(args.seed)
    with Job(args.phalanx, hidden_size=64, n_layers=4, micro_batch_size=2, more="reproducible: true\n") as job:
        run = job.start("--max_steps", str(args.steps), *overrides)

        def n_steps():
            return len(job.steps_ms())

        gaps = []
        while run.poll() is None:
            time.sleep(0.01)
            if len(gaps) == args.kills or n_steps() < 5:
                continue
            time.sleep(dice.uniform(0.2, 0.6))
            alive = ranks(run.pid)
            if not alive or run.poll() is not None:
                continue
            victim, before, begin = dice.choice(alive), n_steps(), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            # The next step in the file may be older than the kill; the one after it is not.
            while run.poll() is None and n_steps() < before + 2:
                time.sleep(0.002)
            gaps.append(time.monotonic() - begin)
            print(f"kill {len(gaps):3} at step {before:5}: {gaps[-1]:.3f} s", flush=True)
        with open(f"{job.folder}/out/model/model.safetensors", "rb") as file:
            weights = hashlib.sha256(file.read()).hexdigest()
        incidents = job.incidents()[1:]
        phases = {name: sorted(i["phases_ms"][name] for i in incidents) for name in (incidents or [{"phases_ms": {}}])[0]["phases_ms"]}
        print("exit code", run.returncode, "steps", n_steps(), "weights", weights[:16])
        if gaps:
            gaps.sort()
            print(f"gap: p50 {gaps[len(gaps) // 2]:.3f} s, max {gaps[-1]:.3f} s")
            print("phases, median ms:", {name: values[len(values) // 2] for name, values in phases.items()})


if __name__ == "__main__":
    main()
