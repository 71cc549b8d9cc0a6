#!/usr/bin/env python3
"""Kills random rank processes of a `phalanx train` run and says how long each time no step was told of.

    python3 tests/peers/kills.py target/release/phalanx --kills 20 --dp_shard_size 2 --elastic.spare_ranks 1

Trains a small model on text of its own, reproducibly; prints one line per kill, then the quantiles of the time from a kill
to the next step that was computed after it, and the hash of the exported weights, which must be that of a run with
`--kills 0`. Needs Python's standard library only.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time

JOB = """
model: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 176, num_hidden_layers: 4,
        num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 128}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 128
micro_batch_size: 2
microbatches_per_step: 4
learning_rate: 1e-3
threads: 1
bf16: false
save_steps: none
reproducible: true
resume_from_checkpoint: none
output_dir: out
"""


def ranks(parent):
    """Process ids of the rank processes of a launcher."""
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", "rank --worker"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=1)
    args, overrides = parser.parse_known_args()
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/job.yaml", "w") as file:
            file.write(JOB)
        with open(f"{folder}/text.txt", "w") as file:
            file.writelines(f"The {i * i % 977}th hoplite holds the line at {i % 24} o'clock. " for i in range(6000))
        command = [os.path.abspath(args.phalanx), "train", "job.yaml", "--max_steps", str(args.steps), *(word for word in overrides if word != "--")]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)

        def n_steps():
            try:
                with open(f"{folder}/out/metrics.jsonl") as file:
                    return len(file.readlines())
            except FileNotFoundError:
                return 0

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
            # A step may have been under way to the file; the one after it was computed behind the kill.
            while run.poll() is None and n_steps() < before + 2:
                time.sleep(0.002)
            gaps.append(time.monotonic() - begin)
            print(f"kill {len(gaps):3} at step {before:5}: {gaps[-1]:.3f} s", flush=True)
        with open(f"{folder}/out/model/model.safetensors", "rb") as file:
            weights = hashlib.sha256(file.read()).hexdigest()
        with open(f"{folder}/out/events.jsonl") as file:
            incidents = [json.loads(line) for line in file if '"incident"' in line][1:]
        phases = {name: sorted(i["phases_ms"][name] for i in incidents) for name in (incidents or [{"phases_ms": {}}])[0]["phases_ms"]}
        print("exit code", run.returncode, "steps", n_steps(), "weights", weights[:16])
        if gaps:
            gaps.sort()
            print(f"gap: p50 {gaps[len(gaps) // 2]:.3f} s, max {gaps[-1]:.3f} s")
            print("phases, median ms:", {name: values[len(values) // 2] for name, values in phases.items()})


if __name__ == "__main__":
    main()
