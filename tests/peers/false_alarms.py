#!/usr/bin/env python3
"""Trains many steps without any fault and counts the comparisons of copies that differed: there must be none.

    python3 tests/peers/false_alarms.py target/release/phalanx --steps 1000000

The steps are divided among jobs with two and three replicas, two shards with shadows, and tensor parallelism beside replicas, each
with and without `reproducible`; copies are compared every `--every` steps. Prints a table of steps and comparisons, and exits with 1 if an
incident names corruption, or if a job did not train all of its steps. Needs only Python's standard library.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

from job import arguments

JOB = """
model: {model_type: llama, vocab_size: 264, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
        num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 16}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 8
micro_batch_size: 1
learning_rate: 1e-4
threads: 1
bf16: false
save_steps: none
logging_steps: 1
resume_from_checkpoint: none
output_dir: out
"""
MESHES = {
    "dp_replicate 2": ["--dp_replicate_size", "2"],
    "dp_replicate 3": ["--dp_replicate_size", "3"],
    "dp_shard 2": ["--dp_shard_size", "2"],
    "tp 2, dp_replicate 2": ["--tensor_parallel_size", "2", "--dp_replicate_size", "2"],
}
MICROBATCHES = {"dp_replicate 3": "3"}


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
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        (root / "job.yaml").write_text(JOB)
        (root / "text.txt").write_text("".join(f"The {i * i % 977}th hoplite holds the line. " for i in range(6000)))
        steps = ["--max_steps", str(n_steps), "--elastic.verify_steps", str(args.every)]
        microbatches = ["--microbatches_per_step", MICROBATCHES.get(mesh, "2")]
        begin = time.monotonic()
        subprocess.run([args.phalanx, "train", "job.yaml", *steps, *microbatches, *words], cwd=root, check=True, stdout=subprocess.DEVNULL)
        took = time.monotonic() - begin
        steps, n_compared, found = 0, 0, 0
        for line in (root / "out/metrics.jsonl").open():
            line = json.loads(line)
            steps, n_compared = max(steps, line["step"]), n_compared + ("verify_pct" in line)
        for line in (root / "out/events.jsonl").open():
            found += "Corrupted" in json.dumps(json.loads(line).get("why"))
    return steps, n_compared, found, n_steps / took


if __name__ == "__main__":
    main()
