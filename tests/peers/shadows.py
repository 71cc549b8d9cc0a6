#!/usr/bin/env python3
"""Overhead of shadows while nothing fails: the median step with and without them, in interleaved runs.

    python3 tests/peers/shadows.py target/release/phalanx --rounds 3 --steps 12 --dp_shard_size 2

Trains a model of 24 M parameters on generated text; the first four steps of a run do not count. Needs only Python's
standard library.
"""

import statistics

from job import Job, arguments

N_WARM_UP = 4


def add(parser):
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)


def main():
    args, overrides = arguments(__doc__, add)
    all_ms = {"false": [], "true": []}
    with Job(args.phalanx, hidden_size=512, n_layers=8, sequence_len=256, micro_batch_size=2) as job:
        for n in range(args.rounds):
            for shadows, found in all_ms.items():
                out = f"{shadows}-{n}"
                job.run("--output_dir", out, "--max_steps", str(args.steps), "--elastic.shadows", shadows, *overrides)
                found.append(statistics.median(job.steps_ms(out)[N_WARM_UP:]))
    without, with_them = (statistics.median(all_ms[shadows]) for shadows in ("false", "true"))
    print(f"without shadows {without:.1f} ms {[round(ms) for ms in all_ms['false']]}")
    print(f"with shadows    {with_them:.1f} ms {[round(ms) for ms in all_ms['true']]}")
    print(f"ratio           {with_them / without:.3f}")


if __name__ == "__main__":
    main()
