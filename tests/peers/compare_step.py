"""Times the training step of Phalanx and PyTorch in interleaved runs; prints a table of medians.

usage: PYTHON_WITH_TORCH tests/peers/compare_step.py [ROUNDS [STEPS [SHAPE [PRECISION]]]]   (from the root, after `cargo build --release -p phalanx-tests`)
SHAPE: `small` (6 layers of width 512, 4,096 words, 4 x 256 tokens) or `medium` (12 layers of width 768, 32,000 words, 1 x 1,024 tokens).
PRECISION: `f32` or `bf16`; both if not given. Without bf16 instructions, PyTorch's bf16 takes minutes.
All start from the same weights and train on the same batch; the losses of all steps must agree. `compile` is `torch.compile`, and
`max-autotune` the same with this mode; both need a C++ compiler. Ratios are the median over the rounds of the time divided by the time
of the fastest of PyTorch's three in that round, with the smallest and largest. Memory is the largest PSS of the process, measured in a
separate run on all sides, less what the same process takes after its imports.
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
SHAPE = sys.argv[3] if len(sys.argv) > 3 else "small"
PRECISIONS = sys.argv[4:] or ["f32", "bf16"]
STEPS_OF_MEMORY = "4"
# Tolerance of a loss in nats: sums in other orders in f32, rounding in other places in bf16.
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2}
STEP_TIME = str(ROOT / "target/release/step_time")
FOLDER = tempfile.TemporaryDirectory()
START = f"{FOLDER.name}/start.safetensors"
IMPORTS = {"eager": "import torch", "compile": "import torch, torch._inductor.compile_fx"}
IMPORTS["max-autotune"] = IMPORTS["compile"]
TORCHES = [f"torch {how}" for how in IMPORTS]


def command(who, mode, steps):
    if who == "phalanx":
        return [STEP_TIME, mode, steps, "--shape", SHAPE]
    return [sys.executable, str(ROOT / "tests/peers/torch_step.py"), who.split()[1], mode, steps, START]


def memory(case):
    """MiB of a run less the imports; also the first compilation of a case, which later runs find in the compiler's cache."""
    who, mode = case
    peak = peak_mib(command(who, mode, STEPS_OF_MEMORY))
    return peak if who == "phalanx" else peak - peak_mib([sys.executable, "-c", IMPORTS[who.split()[1]]])


subprocess.run([STEP_TIME, "f32", "1", "--shape", SHAPE, "--write", START], check=True, capture_output=True)
CASES = [(who, mode) for mode in PRECISIONS for who in (*TORCHES, "phalanx")]
peaks = {}
for case in CASES:
    memory(case)  # Compiles.
    peaks[case] = memory(case)
results = {case: [] for case in CASES}
for _ in range(ROUNDS):
    for case in CASES:
        line = subprocess.run(command(*case, STEPS), check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        results[case].append(json.loads(line))


def times(case):
    return [round["median_ms"] for round in results[case]]


def losses(case):
    return [loss for round in results[case] for loss in round["losses"]]


def off(case):
    """The largest difference of a loss from eager PyTorch, in any round."""
    ours, theirs = losses(case), losses(("torch eager", case[1]))
    assert len(ours) == len(theirs) == ROUNDS * int(STEPS), (len(ours), len(theirs))
    return max(abs(a - b) for a, b in zip(ours, theirs))


print("| step | median ms | rounds (medians of a process) | ratio to the best of PyTorch | MiB | ratio | last loss | losses differ by |")
print("|---|--:|---|---|--:|--:|--:|--:|")
for who, mode in CASES:
    case = (who, mode)
    best = [min(of_round) for of_round in zip(*(times((torch, mode)) for torch in TORCHES))]
    ratios = sorted(ours / theirs for ours, theirs in zip(times(case), best))
    rounds = " ".join(f"{ms:.0f}" for ms in times(case))
    memories = peaks[case] / min(peaks[(torch, mode)] for torch in TORCHES)
    print(f"| {who} {mode} | {statistics.median(times(case)):.0f} | {rounds} "
          f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f}) | {peaks[case]:.0f} | {memories:.2f} "
          f"| {losses(case)[-1]:.4f} | {off(case):.1e} |")
if len(PRECISIONS) == 2:
    own = sorted(half / full for half, full in zip(times(("phalanx", "bf16")), times(("phalanx", "f32"))))
    print(f"\nphalanx bf16 to f32: {statistics.median(own):.3f} ({own[0]:.3f}–{own[-1]:.3f})")
for case in CASES:
    assert off(case) < TOLERANCE[case[1]], f"{case}: a loss differs by {off(case)}"
