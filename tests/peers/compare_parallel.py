"""Times the training step of several ranks of Phalanx and of PyTorch on Gloo in interleaved runs; prints a table of medians.

usage: PYTHON_WITH_TORCH tests/peers/compare_parallel.py [ROUNDS [STEPS [RANKS [CASE]]]]     (from the root, after `cargo build --release`)
All: a Llama of 6 layers of width 512 from the same weights, two processes (or RANKS) with one thread each, a batch of 4 x 256 per rank
from the same text in the same order; the losses of all steps must agree. PyTorch runs without and with `torch.compile`; ratios are the
median over the rounds of the time divided by the faster one's in that round, with the smallest and largest. Memory is the largest PSS
per rank process, on the average over the ranks, measured in separate runs on all sides; the launcher does not count. CASE, such as
`ddp f32`, runs that one alone.
"""
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import torch as pytorch

import safetensors_file
from pss import children, command_line, peak_mib
from torch_step import Model, Shape, name_in_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
RANKS = int(sys.argv[3]) if len(sys.argv) > 3 else 2
STEPS_OF_MEMORY = 4
# Tolerance of a loss in nats: sums in other orders in f32, rounding in other places in bf16.
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2}
FOLDER = tempfile.TemporaryDirectory()
WORK = pathlib.Path(FOLDER.name)
TEXT, MODEL, OUT, YAML = WORK / "text.txt", WORK / "model", WORK / "out", WORK / "job.yaml"
CONFIG = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
          "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "tie_word_embeddings": False}
SHAPE = Shape(width=512, ff=1408, layers=6, vocabulary=4096, seq_len=256)
JOB = """
base_model: {model}
tokenizer: bytes
datasets: [{{path: {text}, type: completion}}]
shuffle: false
sequence_len: 256
micro_batch_size: 4
max_steps: {steps}
learning_rate: 3e-4
lr_scheduler: constant
warmup_steps: 0
weight_decay: 0.1
max_grad_norm: none
bf16: {bf16}
threads: 1
save_steps: none
resume_from_checkpoint: none
output_dir: {out}
elastic: {{spare_ranks: 0, shadows: false}}
{mesh}: {ranks}
"""


def prepare():
    """Writes the text, without characters that could form special tokens, and a model directory."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "strategies/src").rglob("*.rs")))
    TEXT.write_bytes(text.replace(b"<", b"("))
    MODEL.mkdir()
    (MODEL / "config.json").write_text(json.dumps(CONFIG))
    pytorch.manual_seed(0)
    model = Model(SHAPE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            pytorch.nn.init.normal_(parameter, std=0.02)
    tensors = {name_in_file(name): parameter for name, parameter in model.named_parameters()}
    safetensors_file.write(MODEL / "model.safetensors", tensors)


def command(who, mode, precision, steps):
    if who == "phalanx":
        return phalanx(mode, precision, steps)
    script = str(ROOT / "tests/peers/torch_parallel_step.py")
    how = who.split()[1]
    return [sys.executable, script, str(RANKS), how, mode, precision, str(steps), str(MODEL / "model.safetensors"), str(TEXT)]


def phalanx(mode, precision, steps):
    shutil.rmtree(OUT, ignore_errors=True)
    mesh = "dp_replicate_size" if mode == "ddp" else "dp_shard_size"
    bf16 = "true" if precision == "bf16" else "false"
    YAML.write_text(JOB.format(model=MODEL, text=TEXT, out=OUT, steps=steps, bf16=bf16, mesh=mesh, ranks=RANKS))
    return [str(ROOT / "target/release/phalanx"), "train", str(YAML)]


def result(who, case):
    done = subprocess.run(command(who, *case, STEPS), check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if who != "phalanx":
        return json.loads(done.stdout.splitlines()[-1])
    lines = [json.loads(line) for line in (OUT / "metrics.jsonl").read_text().splitlines()]
    times = [line["step_ms"] for line in lines[2:]]
    return {"median_ms": statistics.median(times), "losses": [line["loss"] for line in lines]}


def ranks(launcher):
    """The rank processes: of torch the spawned ones, without the resource tracker."""
    pids = [pid for pid in children(launcher) if "rank --worker" in command_line(pid) or "spawn_main" in command_line(pid)]
    return pids if len(pids) == RANKS else []


prepare()
CASES = [(mode, precision) for mode in ("ddp", "fsdp") for precision in ("f32", "bf16")]
CASES = [case for case in CASES if list(case) == sys.argv[4:] or not sys.argv[4:]]
assert CASES, f"no such case: {' '.join(sys.argv[4:])}; `ddp` or `fsdp`, then `f32` or `bf16`"
TORCHES = ["torch eager", "torch compile"]
SIDES = [*TORCHES, "phalanx"]
peaks = {(who, case): peak_mib(command(who, *case, STEPS_OF_MEMORY), ranks) for case in CASES for who in SIDES}
results = {(who, case): [] for case in CASES for who in SIDES}
for _ in range(ROUNDS):
    for case in CASES:
        for who in SIDES:
            results[(who, case)].append(result(who, case))


def times(who, case):
    return [round["median_ms"] for round in results[(who, case)]]


def off(who, case):
    """The largest difference of a loss from eager PyTorch, in any round."""
    ours, theirs = ([loss for round in results[(of, case)] for loss in round["losses"]] for of in (who, "torch eager"))
    assert len(ours) == len(theirs) == ROUNDS * STEPS, (len(ours), len(theirs))
    return max(abs(a - b) for a, b in zip(ours, theirs))


print(f"| {RANKS} ranks | median ms | rounds (medians of a run) | ratio to the best of PyTorch | MiB a rank | ratio | last loss | losses differ by |")
print("|---|--:|---|---|--:|--:|--:|--:|")
for (who, case), rounds in results.items():
    best = [min(of_round) for of_round in zip(*(times(torch, case) for torch in TORCHES))]
    ratios = sorted(ours / theirs for ours, theirs in zip(times(who, case), best))
    shown = " ".join(f"{ms:.0f}" for ms in times(who, case))
    memory = peaks[(who, case)] / min(peaks[(torch, case)] for torch in TORCHES)
    print(f"| {who} {' '.join(case)} | {statistics.median(times(who, case)):.0f} | {shown} "
          f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f}) | {peaks[(who, case)]:.0f} | {memory:.2f} "
          f"| {rounds[-1]['losses'][-1]:.4f} | {off(who, case):.1e} |")
for who, case in results:
    assert off(who, case) < TOLERANCE[case[1]], f"{who} {case}: a loss differs by {off(who, case)}"
