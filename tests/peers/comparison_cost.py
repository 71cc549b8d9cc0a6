#!/usr/bin/env python3
"""Measures what comparing copies of the state costs: the share of the time of training, at the automatic interval.

    python3 tests/peers/comparison_cost.py target/release/phalanx --steps 3000

Trains a small model with two replicas and with two shards, whose shadows are the copies, with the default of
`elastic.verify_steps`. Prints for each the steps, the comparisons, and the time of all comparisons (waits for the other rank
included) over the time of all steps. Exits with 1 if a share is above 0.1 %. Needs only Python's standard library.
"""

import statistics
import sys

from job import Job, arguments

ALLOWED = 1e-3
MESHES = {"dp_replicate 2": ["--dp_replicate_size", "2"], "dp_shard 2": ["--dp_shard_size", "2"]}


def add(parser):
    parser.add_argument("--steps", type=int, default=3000)


def main():
    args, overrides = arguments(__doc__, add)
    worst = 0.0
    print("| mesh | steps | step, median | comparisons | comparison, median | share of the time |")
    print("|---|---|---|---|---|---|")
    for mesh, words in MESHES.items():
        with Job(args.phalanx, hidden_size=128, n_layers=4) as job:
            job.run("--max_steps", str(args.steps), *words, *overrides)
            lines = [line for line in job.lines("out/metrics.jsonl") if "step_ms" in line]
        spent = [line["step_ms"] * line["verify_pct"] / 100 for line in lines if "verify_pct" in line]
        assert spent, "no copies were compared"
        steps = [line["step_ms"] for line in lines]
        share = sum(spent) / sum(steps)
        worst = max(worst, share)
        medians = f"{statistics.median(steps):.2f} ms | {len(spent)} | {statistics.median(spent):.2f} ms"
        print(f"| {mesh} | {len(steps)} | {medians} | {100 * share:.3f} % |", flush=True)
    sys.exit(worst > ALLOWED)


if __name__ == "__main__":
    main()
