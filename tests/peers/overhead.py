#!/usr/bin/env python3
"""What elasticity costs while nothing fails, in processor time: all threads of a job but those that compute.

    python3 tests/peers/overhead.py target/release/phalanx --seconds 20 --dp_replicate_size 2

Trains a model of 5 M parameters on text of its own and adds up, from the kernel's account of each thread, what coordinator,
supervisor, signs of life and orders took beside the device threads. Wall-clock comparisons of two runs differ by more than
that on any machine with neighbours (`cargo bench -p phalanx --bench elasticity` makes them anyhow). Needs Python's standard
library and Linux.
"""

import argparse
import os
import subprocess
import tempfile
import time

JOB = """
model: {model_type: llama, vocab_size: 512, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6,
        num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 128}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 128
micro_batch_size: 2
microbatches_per_step: 4
learning_rate: 1e-4
threads: 1
bf16: false
save_steps: none
resume_from_checkpoint: none
output_dir: out
"""


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    parser.add_argument("--seconds", type=float, default=20)
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/job.yaml", "w") as file:
            file.write(JOB)
        with open(f"{folder}/text.txt", "w") as file:
            file.writelines(f"The {i * i % 977}th hoplite holds the line at {i % 24} o'clock. " for i in range(6000))
        command = [os.path.abspath(args.phalanx), "train", "job.yaml", "--max_steps", "1000000", *overrides]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)

        def n_steps():
            try:
                with open(f"{folder}/out/metrics.jsonl") as lines:
                    return sum("step_ms" in line for line in lines)
            except FileNotFoundError:
                return 0

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
    print(f"all but the devices          {100 * sum(used.values()) / devices:.2f} % of what the devices took")


if __name__ == "__main__":
    main()
