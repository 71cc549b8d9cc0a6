#!/usr/bin/env python3
"""Times a step of `phalanx train` beside that of its bare program, in interleaved runs.

    python3 tests/peers/trained_step.py target/release/phalanx --rounds 5        (after `cargo build --release --workspace`)

The bare program is `step_time`, which `compare_step.py` compares with PyTorch: the compiled step of the small model alone, on one batch.
The job trains the same model with the same batch size and threads, and adds what a run has: a coordinator, a rank process, data, metrics.
A time is that from the end of a step to the end of the next one. Needs only Python's standard library.
"""
import json
import pathlib
import statistics
import subprocess

from job import Job, arguments

SHAPE = {"hidden_size": 512, "n_layers": 6, "sequence_len": 256, "micro_batch_size": 4}
SETTINGS = ["--model.vocab_size", "4096", "--microbatches_per_step", "1", "--threads", "2", "--max_grad_norm", "none", "--weight_decay", "0.1"]


def add(parser):
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)


def bare(binary, precision, steps):
    done = subprocess.run([binary, precision, str(steps)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["median_ms"]


def trained(phalanx, precision, steps, overrides):
    with Job(phalanx, **SHAPE) as job:
        job.run("--bf16", str(precision == "bf16").lower(), "--max_steps", str(steps), *SETTINGS, *overrides)
        return statistics.median(job.steps_ms()[2:])


args, overrides = arguments(__doc__, add)
step_time = pathlib.Path(args.phalanx).with_name("step_time")
print("| step | bare program, ms | `phalanx train`, ms | ratio |")
print("|---|--:|--:|---|")
for precision in ("f32", "bf16"):
    rounds = [(bare(step_time, precision, args.steps), trained(args.phalanx, precision, args.steps, overrides)) for _ in range(args.rounds)]
    ratios = sorted(whole / program for program, whole in rounds)
    of_program, of_job = (statistics.median(side) for side in zip(*rounds))
    print(f"| {precision} | {of_program:.0f} | {of_job:.0f} | {statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f}) |")
