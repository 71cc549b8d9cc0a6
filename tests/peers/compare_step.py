"""Times the training step of Phalanx and PyTorch side by side, interleaved, and prints a table of medians.

usage: PYTHON_WITH_TORCH tests/peers/compare_step.py [ROUNDS [STEPS]]     (from the root, after `cargo build --release --workspace`)
"""
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
STEPS = sys.argv[2] if len(sys.argv) > 2 else "12"
CASES = {
    ("torch", "f32"): [sys.executable, str(ROOT / "tests/peers/torch_step.py"), "f32", STEPS],
    ("phalanx", "f32"): [str(ROOT / "target/release/step_time"), "f32", STEPS],
    ("torch", "bf16"): [sys.executable, str(ROOT / "tests/peers/torch_step.py"), "bf16", STEPS],
    ("phalanx", "bf16"): [str(ROOT / "target/release/step_time"), "bf16", STEPS],
}
results = {case: [] for case in CASES}
for _ in range(ROUNDS):
    for case, command in CASES.items():
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        results[case].append(json.loads(line))


def median(case, key):
    return statistics.median(r[key] for r in results[case])


print("| step | median ms | rounds (medians of a process) | ratio | peak MiB | ratio |")
print("|---|---|---|---|---|---|")
for (who, mode), rounds in results.items():
    time, peak = median((who, mode), "median_ms"), median((who, mode), "peak_rss_mib")
    rounds = " ".join(f"{r['median_ms']:.0f}" for r in rounds)
    t, p = time / median(("torch", mode), "median_ms"), peak / median(("torch", mode), "peak_rss_mib")
    print(f"| {who} {mode} | {time:.0f} | {rounds} | {t:.2f} | {peak:.0f} | {p:.2f} |")
