#!/usr/bin/env python3
"""Lets a killed rank's successor join while the others train on, and says how long each waited for it.

    python3 tests/peers/joins.py target/release/phalanx --kills 5 --dp_replicate_size 2

Trains a model of 6 M parameters on text of its own, without spare processes and without patience: the survivors shrink and
go on at once, the successor joins when it can. Prints, for each kill, the longest gap between two steps from the survivors'
first one alone to the first one together, and the times from the successor's process start to its world and to the first
step that it took part in. The gap is measured by the median step of survivors alone, from a run of their own (--alone: what
the mesh is then). Needs Python's standard library only.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time

JOB = """
model: {model_type: llama, vocab_size: 512, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6,
        num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 128}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 128
micro_batch_size: 1
microbatches_per_step: 4
learning_rate: 1e-4
threads: 1
bf16: false
save_steps: none
logging_steps: 1
reproducible: true
resume_from_checkpoint: none
output_dir: out
elastic: {replace_patience: 0.0}
"""


def ranks(parent):
    """Process ids of the rank processes of a launcher."""
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", "rank --worker"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


class Steps:
    """When steps were told of: (monotonic seconds, step)."""

    def __init__(self, path):
        self.path, self.file, self.rest, self.seen = path, None, "", []

    def look(self):
        if self.file is None:
            if not os.path.exists(self.path):
                return
            self.file = open(self.path)
        text = self.rest + self.file.read()
        *lines, self.rest = text.split("\n")
        now = time.monotonic()
        self.seen += [(now, json.loads(line)["step"]) for line in lines if '"step_ms"' in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--alone", default="--dp_replicate_size 1", help="the mesh of the survivors")
    parser.add_argument("--between", type=int, default=6, help="steps between a join and the next kill")
    parser.add_argument("--log", type=argparse.FileType("w"), default=subprocess.DEVNULL, help="where the run's own output goes")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/job.yaml", "w") as file:
            file.write(JOB)
        with open(f"{folder}/text.txt", "w") as file:
            file.writelines(f"The {i * i % 977}th hoplite holds the line at {i % 24} o'clock. " for i in range(6000))
        train = [os.path.abspath(args.phalanx), "train", "job.yaml"]
        subprocess.run([*train, "--max_steps", "14", "--output_dir", "alone", *args.alone.split()], cwd=folder, stdout=args.log, check=True)
        with open(f"{folder}/alone/metrics.jsonl") as lines:
            alone = statistics.median([json.loads(line)["step_ms"] / 1e3 for line in lines if "step_ms" in line][4:])
        command = [*train, "--max_steps", "100000", *(word for word in overrides if word != "--")]
        run = subprocess.Popen(command, cwd=folder, stdout=args.log)
        steps = Steps(f"{folder}/out/metrics.jsonl")

        def incidents():
            try:
                with open(f"{folder}/out/events.jsonl") as file:
                    return [json.loads(line) for line in file if '"incident"' in line]
            except FileNotFoundError:
                return []

        def until(is_so):
            while not is_so():
                assert run.poll() is None, "the run has ended"
                time.sleep(0.001)
                steps.look()

        rows = []
        until(lambda: len(steps.seen) >= args.between)
        for n in range(args.kills):
            before, n_incidents = set(ranks(run.pid)), len(incidents())
            os.kill(max(before), signal.SIGKILL)
            killed = time.monotonic()
            until(lambda: set(ranks(run.pid)) - before)
            started = time.monotonic()
            until(lambda: len(incidents()) >= n_incidents + 2)
            joined = time.monotonic()
            n_joined = len(steps.seen)
            until(lambda: len(steps.seen) >= n_joined + 1)
            first = time.monotonic()
            until(lambda: len(steps.seen) >= n_joined + args.between)
            times = [at for at, _ in steps.seen]
            # The gap in which the kill fell is the failure's, not the join's.
            pairs = [(a, b) for a, b in zip(times, times[1:]) if a > killed and a <= first]
            longest = max((b - a for a, b in pairs), default=first - joined)
            together = statistics.median(b - a for a, b in zip(times[n_joined + 1 :], times[n_joined + 2 :]))
            rows.append((longest / alone, joined - started))
            print(f"join {n + 1}: longest gap {longest * 1e3:.0f} ms, a step alone {alone * 1e3:.0f} ms, together {together * 1e3:.0f} ms; "
                  f"from process start to its world {joined - started:.3f} s, to its first step {first - started:.3f} s; "
                  f"healed in {incidents()[n_incidents + 1]['phases_ms']['heal']:.0f} ms", flush=True)
        run.send_signal(signal.SIGKILL)
        run.wait()
        gaps, starts = ([row[i] for row in rows] for i in (0, 1))
        print(f"longest gap: median {statistics.median(gaps):.2f}, max {max(gaps):.2f} steps of survivors alone")
        print(f"process start to its world: median {statistics.median(starts):.3f} s, max {max(starts):.3f} s")


if __name__ == "__main__":
    main()
