#!/usr/bin/env python3
"""Compares the training steps of two builds of Phalanx.

    python3 tests/peers/versions.py before/phalanx after/phalanx --rounds 15 --bf16 false --dp_replicate_size 2

Both builds train the same small model on generated text, in turns of random order. A step's time is the wall time between two
printed steps, which means the same in every version. Prints the ratio after/before of the median steps, as the median over the
rounds with its 95 % interval (bootstrap). Needs only Python's standard library.
"""

import os
import random
import statistics
import subprocess
import time

from job import Job, arguments

WARM_UP = 5


def add(parser):
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)


def median_step_ms(job, program, steps, overrides):
    job.train[0] = program
    run = job.start("--max_steps", str(WARM_UP + steps), *overrides, stdout=subprocess.PIPE)
    times = [time.monotonic() for line in run.stdout if line.startswith(b"step ")]
    assert run.wait() == 0, "the run failed"
    assert len(times) == WARM_UP + steps, f"{len(times)} steps were printed"
    times = times[WARM_UP:]
    return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:]))


def interval(ratios, dice):
    draws = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return draws[249], draws[9749]


def main():
    args, overrides = arguments(__doc__, add)
    dice, programs = random.Random(1), [args.phalanx, os.path.abspath(args.after)]
    figures = {program: [] for program in programs}
    with Job(args.phalanx) as job:
        for program in programs:
            median_step_ms(job, program, 2, overrides)
        for _ in range(args.rounds):
            for program in dice.sample(programs, 2):
                figures[program].append(median_step_ms(job, program, args.steps, overrides))
    before, after = (figures[program] for program in programs)
    ratios = [b / a for a, b in zip(before, after)]
    low, high = interval(ratios, dice)
    print(f"before {statistics.median(before):.2f} ms, after {statistics.median(after):.2f} ms")
    print(f"after/before {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}, {args.rounds} rounds")


if __name__ == "__main__":
    main()
