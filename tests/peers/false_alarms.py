#!/usr/bin/env python3
"""Trains many steps without any fault and counts the comparisons of copies that differed: there must be none.

    python3 tests/peers/false_alarms.py target/release/phalanx --steps 1000000

The steps are divided among jobs with two and three replicas, two shards with shadows, and tensor parallelism beside replicas, each
with and without `reproducible`; copies are compared every `--every` steps. Prints a table of steps and comparisons, and exits with 1 if an
incident names corruption, or if a job did not train all of its steps. Needs only Python's standard library.
"""

import json
import sys
import time

from job import Job, arguments

MESHES = {
    "dp_replicate 2": ["--dp_replicate_size", "2"],
    "dp_replicate 3": ["--dp_replicate_size", "3"],
    "dp_shard 2": ["--dp_shard_size", "2"],
    "tp 2, dp_replicate 2": ["--tensor_parallel_size", "2", "--dp_replicate_size", "2"],
}
MICROBATCHES = {"dp_replicate 3": "3"}  # shared out evenly among the replicas; 2 otherwise


def add(parser):
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=20)


def main():
    args, overrides = arguments(__doc__, add)
    each, sum_of_steps, alarms = args.steps // (2 * len(MESHES)), 0, 0
    print("| mesh | reproducible | steps | comparisons | differences | steps/s |")
    print("|---|---|---|---|---|---|")
    for mesh, words in MESHES.items():
        for reproducible in ["false", "true"]:
            n_steps, n_compared, found, rate = train(args, each, mesh, [*words, "--reproducible", reproducible, *overrides])
            print(f"| {mesh} | {reproducible} | {n_steps} | {n_compared} | {found} | {rate:.0f} |", flush=True)
            assert n_steps == each, f"{mesh}: trained {n_steps} steps of {each}"
            sum_of_steps, alarms = sum_of_steps + n_steps, alarms + found
    print(f"{sum_of_steps} steps, {alarms} alarms")
    sys.exit(alarms > 0)


def train(args, n_steps, mesh, words):
    """Returns the steps trained, the comparisons, the incidents of corruption, and the steps per second."""
    steps = ["--max_steps", str(n_steps), "--elastic.verify_steps", str(args.every)]
    microbatches = ["--microbatches_per_step", MICROBATCHES.get(mesh, "2")]
    with Job(args.phalanx, hidden_size=16, n_layers=1, sequence_len=8) as job:
        begin = time.monotonic()
        job.run(*steps, *microbatches, *words)
        took = time.monotonic() - begin
        steps, n_compared, found = 0, 0, 0
        for line in map(json.loads, open(f"{job.folder}/out/metrics.jsonl")):
            steps, n_compared = max(steps, line["step"]), n_compared + ("verify_pct" in line)
        for incident in job.incidents():
            found += "Corrupted" in json.dumps(incident["why"])
    return steps, n_compared, found, n_steps / took


if __name__ == "__main__":
    main()
