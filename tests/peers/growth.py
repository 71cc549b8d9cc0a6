"""Times the training step of Phalanx and of `torch.compile` over tokens, width, layers and vocabulary; prints a table.

usage: PYTHON_WITH_TORCH tests/peers/growth.py [ROUNDS [STEPS [PRECISION]]]   (from the root, after `cargo build --release -p phalanx-tests`)
Each series changes one number of a Llama of 6 layers of width 512, 4,096 words and one row of 1,024 tokens. Both sides start from the
same weights and batch, in interleaved runs of one process each; times are medians of the processes' medians, and growth is a time divided
by that of the series' first model. See compare_parallel.py for numbers of ranks.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
STEPS = sys.argv[2] if len(sys.argv) > 2 else "6"
PRECISION = sys.argv[3] if len(sys.argv) > 3 else "f32"
BASE = {"width": 512, "layers": 6, "vocabulary": 4096, "rows": 1, "tokens": 1024}
SERIES = {"tokens": [256, 1024, 4096], "width": [256, 512, 1024], "layers": [3, 6, 12], "vocabulary": [4096, 32768, 131072]}
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2}
STEP_TIME = str(ROOT / "target/release/step_time")


def run(command):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def times(shape):
    """Medians of both sides, in ms: torch's, ours."""
    name = "x".join(str(shape[number]) for number in BASE)
    with tempfile.TemporaryDirectory() as folder:
        start = f"{folder}/start.safetensors"
        run([STEP_TIME, PRECISION, "1", "--shape", name, "--write", start])
        torch = [sys.executable, str(ROOT / "tests/peers/torch_step.py"), "compile", PRECISION, STEPS, start]
        sides = [torch, [STEP_TIME, PRECISION, STEPS, "--shape", name]]
        rounds = [[run(side) for side in sides] for _ in range(ROUNDS)]
    off = max(abs(a - b) for pair in rounds for a, b in zip(*(side["losses"] for side in pair)))
    assert off < TOLERANCE[PRECISION], f"{name}: a loss differs by {off}"
    return [statistics.median(side["median_ms"] for side in of) for of in zip(*rounds)]


seen = {}
print("| | torch.compile ms | growth | phalanx ms | growth | ratio |\n|---|--:|--:|--:|--:|--:|")
for number, values in SERIES.items():
    for value in values:
        key = tuple({**BASE, number: value}.items())
        seen[key] = seen.get(key) or times(dict(key))
        first = seen[tuple({**BASE, number: values[0]}.items())]
        (torch, ours), (torch_growth, growth) = seen[key], (t / f for t, f in zip(seen[key], first))
        print(f"| {value:,} {number} | {torch:.0f} | {torch_growth:.2f} | {ours:.0f} | {growth:.2f} | {ours / torch:.2f} |", flush=True)
