#!/usr/bin/env python3
"""What shadows cost while nothing fails: the median step with and without them, interleaved.

    python3 tests/peers/shadows.py target/release/phalanx --rounds 3 --steps 12 --dp_shard_size 2

Trains a model of 24 M parameters on text of its own; the first four steps of a run do not count. Needs Python's standard
library only.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

JOB = """
model: {model_type: llama, vocab_size: 512, hidden_size: 512, intermediate_size: 1376, num_hidden_layers: 8,
        num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 256}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 256
micro_batch_size: 2
microbatches_per_step: 4
learning_rate: 1e-4
threads: 1
bf16: false
save_steps: none
logging_steps: 1
resume_from_checkpoint: none
"""
N_WARM_UP = 4


def steps_ms(program, folder, n_steps, overrides):
    out = tempfile.mkdtemp(dir=folder)
    command = [program, "train", "job.yaml", "--output_dir", out, "--max_steps", str(n_steps), *overrides]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    with open(f"{out}/metrics.jsonl") as lines:
        steps = [json.loads(line) for line in lines]
    return [step["step_ms"] for step in steps if "step_ms" in step][N_WARM_UP:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args, overrides = parser.parse_known_args()
    program = os.path.abspath(args.phalanx)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/job.yaml", "w") as file:
            file.write(JOB)
        with open(f"{folder}/text.txt", "w") as file:
            file.writelines(f"The {i * i % 977}th hoplite holds the line at {i % 24} o'clock. " for i in range(6000))
        all_ms = {"false": [], "true": []}
        for _ in range(args.rounds):
            for shadows, found in all_ms.items():
                found.append(statistics.median(steps_ms(program, folder, args.steps, ["--elastic.shadows", shadows, *overrides])))
    without, with_them = (statistics.median(all_ms[shadows]) for shadows in ("false", "true"))
    print(f"without shadows {without:.1f} ms {[round(ms) for ms in all_ms['false']]}")
    print(f"with shadows    {with_them:.1f} ms {[round(ms) for ms in all_ms['true']]}")
    print(f"ratio           {with_them / without:.3f}")


if __name__ == "__main__":
    main()
