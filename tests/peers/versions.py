#!/usr/bin/env python3
"""Compares the training steps of two builds of Phalanx.

    python3 tests/peers/versions.py before/phalanx after/phalanx --turns 200 --bf16 false --dp_replicate_size 2 \
        --microbatches_per_step 2

Both builds train the same small model on generated text at the same time, but only one of them runs: they are stopped and
continued in turns of 0.8 s, because the speed of a shared machine drifts within seconds. Prints two ratios after/before with
their 95 % intervals (bootstrap over pairs of turns): of the 20th percentile of the reported times of steps, because other guests
of the machine only add time, to some of the steps; and of the time per completed step. The former differs between versions if
they report different times: before the control planes were merged, the time left out what a rank does between two steps. Needs
only Python's standard library.
"""

import os
import random
import signal
import subprocess
import time

from job import Job, arguments, ranks

TURN_S = 0.8
WARM_UP = 20


def add(parser):
    parser.add_argument("after")
    parser.add_argument("--turns", type=int, default=200)


class Run:
    """A job that trains only during its turns."""

    def __init__(self, job, program, out, overrides):
        words = [program, "train", "job.yaml", "--max_steps", "1000000", "--output_dir", out, *overrides]
        self.process = subprocess.Popen(words, cwd=job.folder, stdout=subprocess.DEVNULL)
        self.steps_ms = lambda: job.steps_ms(out)
        while len(self.steps_ms()) < WARM_UP:
            assert self.process.poll() is None, "the run has ended"
            time.sleep(0.05)
        self.signal(signal.SIGSTOP)

    def signal(self, which):
        # Rank processes have process groups of their own.
        for pid in [*ranks(self.process.pid), self.process.pid]:
            os.kill(pid, which)

    def turn(self):
        """Milliseconds of the steps of one turn, without the step during which the job was stopped."""
        first = len(self.steps_ms())
        self.signal(signal.SIGCONT)
        time.sleep(TURN_S)
        self.signal(signal.SIGSTOP)
        assert self.process.poll() is None, "the run has ended"
        return [ms for ms in self.steps_ms()[first:] if ms < 1e3 * TURN_S]

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.wait()


def reported(steps):
    return sorted(steps)[len(steps) // 5]


def per_step(steps):
    return 1 / len(steps)


def ratio(figures, of):
    before, after = ([ms for turn in column for ms in turn] for column in zip(*figures))
    return of(after) / of(before)


def main():
    args, overrides = arguments(__doc__, add)
    figures = []
    with Job(args.phalanx, hidden_size=192, n_layers=3, micro_batch_size=1) as job:
        programs = {"before": args.phalanx, "after": os.path.abspath(args.after)}
        runs = [Run(job, program, out, ["--microbatches_per_step", "1", *overrides]) for out, program in programs.items()]
        try:
            for i in range(args.turns):
                turns = [(run, run.turn()) for run in (runs if i % 2 == 0 else reversed(runs))]
                figures.append([ms for run, ms in sorted(turns, key=lambda turn: runs.index(turn[0]))])
        finally:
            for run in runs:
                run.end()
    dice = random.Random(1)
    before, after = ([ms for turn in column for ms in turn] for column in zip(*figures))
    print(f"before {reported(before):.2f} ms ({len(before)} steps), after {reported(after):.2f} ms ({len(after)} steps)")
    for name, of in [("reported time", reported), ("time per step", per_step)]:
        draws = sorted(ratio(dice.choices(figures, k=len(figures)), of) for _ in range(1000))
        print(f"{name}: after/before {ratio(figures, of):.4f}, 95 % interval {draws[25]:.4f} to {draws[974]:.4f}")


if __name__ == "__main__":
    main()
