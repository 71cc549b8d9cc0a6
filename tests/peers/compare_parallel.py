"""Times the training step of two ranks, Phalanx and PyTorch on Gloo side by side, interleaved; prints a table of medians.

usage: PYTHON_WITH_TORCH tests/peers/compare_parallel.py [ROUNDS [STEPS]]     (from the root, after `cargo build --release`)
Both: the model of torch_step.py, two processes with one thread each, a batch of 4 x 256 each.
"""
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
WORK = pathlib.Path(tempfile.mkdtemp())
JOB = """
model: {{model_type: llama, vocab_size: 4096, hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 6,
        num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 256}}
tokenizer: bytes
datasets: [{{path: {text}, type: completion}}]
sequence_len: 256
micro_batch_size: 4
max_steps: {steps}
learning_rate: 3e-4
weight_decay: 0.1
max_grad_norm: none
bf16: {bf16}
threads: 1
save_steps: none
resume_from_checkpoint: none
output_dir: {out}
{mesh}: 2
"""


def torch(mode, precision):
    script = str(ROOT / "tests/peers/torch_parallel_step.py")
    command = [sys.executable, script, mode, precision, str(STEPS)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def phalanx(mode, precision):
    text, out, job = WORK / "text.txt", WORK / "out", WORK / "job.yaml"
    shutil.rmtree(out, ignore_errors=True)
    if not text.exists():
        text.write_text("".join(p.read_text() for p in sorted((ROOT / "strategies/src").rglob("*.rs"))))
    mesh = "dp_replicate_size" if mode == "ddp" else "dp_shard_size"
    bf16 = "true" if precision == "bf16" else "false"
    job.write_text(JOB.format(text=text, out=out, steps=STEPS, bf16=bf16, mesh=mesh))
    command = [str(ROOT / "target/release/phalanx"), "train", str(job)]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_ms" in line]
    peak = max(line.get("memory_bytes", 0) for line in lines) / 2**20
    return {"median_ms": statistics.median(line["step_ms"] for line in lines[2:]), "peak_rss_mib": peak}


CASES = [(mode, precision) for mode in ("ddp", "fsdp") for precision in ("f32", "bf16")]
results = {(who.__name__, *case): [] for case in CASES for who in (torch, phalanx)}
for _ in range(ROUNDS):
    for case in CASES:
        for who in (torch, phalanx):
            results[(who.__name__, *case)].append(who(*case))

print("| two ranks | median ms | rounds (medians of a run) | ratio | MiB a rank | ratio |")
print("|---|---|---|---|---|---|")
for (who, *case), rounds in results.items():
    def median(of, key):
        return statistics.median(r[key] for r in results[(of, *case)])
    shown = " ".join(f"{r['median_ms']:.0f}" for r in rounds)
    t, p = median(who, "median_ms") / median("torch", "median_ms"), median(who, "peak_rss_mib") / median("torch", "peak_rss_mib")
    print(f"| {who} {' '.join(case)} | {median(who, 'median_ms'):.0f} | {shown} | {t:.2f} | {median(who, 'peak_rss_mib'):.0f} | {p:.2f} |")
