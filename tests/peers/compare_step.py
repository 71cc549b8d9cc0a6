"""Times the training step of Phalanx and PyTorch in interleaved runs; prints a table of medians.

usage: PYTHON_WITH_TORCH tests/peers/compare_step.py [ROUNDS [STEPS]]     (from the root, after `cargo build --release --workspace`)
All start from the same weights and train on the same batch; the losses of all steps must agree. `compile` is `torch.compile`,
which needs a C++ compiler. Memory is the largest PSS of the process, measured in a separate run on all sides.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from pss import peak_mib

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
STEPS = sys.argv[2] if len(sys.argv) > 2 else "12"
STEPS_OF_MEMORY = "4"
# Tolerance of a loss in nats: sums in other orders in f32, rounding in other places in bf16.
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2}
STEP_TIME = str(ROOT / "target/release/step_time")
FOLDER = tempfile.TemporaryDirectory()
START = f"{FOLDER.name}/start.safetensors"


def command(who, mode, steps):
    if who == "phalanx":
        return [STEP_TIME, mode, steps]
    return [sys.executable, str(ROOT / "tests/peers/torch_step.py"), who.split()[1], mode, steps, START]


subprocess.run([STEP_TIME, "f32", "1", "--write", START], check=True, capture_output=True)
CASES = [(who, mode) for mode in ("f32", "bf16") for who in ("torch eager", "torch compile", "phalanx")]
peaks = {case: peak_mib(command(*case, STEPS_OF_MEMORY)) for case in CASES}
results = {case: [] for case in CASES}
for _ in range(ROUNDS):
    for case in CASES:
        line = subprocess.run(command(*case, STEPS), check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        results[case].append(json.loads(line))


def off(case):
    """The largest difference of a loss from eager PyTorch, in any round."""
    ours = [loss for round in results[case] for loss in round["losses"]]
    theirs = [loss for round in results[("torch eager", case[1])] for loss in round["losses"]]
    assert len(ours) == len(theirs) == ROUNDS * int(STEPS), (len(ours), len(theirs))
    return max(abs(a - b) for a, b in zip(ours, theirs))


print("| step | median ms | rounds (medians of a process) | ratio | peak MiB | ratio | last loss | losses differ by |")
print("|---|---|---|---|---|---|---|---|")
for (who, mode), rounds in results.items():
    eager = ("torch eager", mode)
    median = lambda case: statistics.median(r["median_ms"] for r in results[case])
    times = " ".join(f"{r['median_ms']:.0f}" for r in rounds)
    t, p = median((who, mode)) / median(eager), peaks[(who, mode)] / peaks[eager]
    print(f"| {who} {mode} | {median((who, mode)):.0f} | {times} | {t:.2f} | {peaks[(who, mode)]:.0f} | {p:.2f} "
          f"| {rounds[-1]['losses'][-1]:.4f} | {off((who, mode)):.1e} |")
for case in CASES:
    assert off(case) < TOLERANCE[case[1]], f"{case}: a loss differs by {off(case)}"
