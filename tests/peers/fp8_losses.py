"""Compares the losses of a Llama of random weights on real text in bf16 and in FP8, on the device that `phalanx train` finds.

usage: fp8_losses.py PHALANX TEXT... [--width 1024] [--layers 12] [--sequence 1024] [--rows 8] [--steps 200] [KEY VALUE...]

The text of the files is read byte by byte; further keys are those of the job. Both runs see the same batches in the same order. Prints the
mean loss of each ten steps and how far the two are apart, and the median time of a step; exits with 1 if a mean differs by more than
0.5 %. Needs only Python's standard library.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

JOB = """
model: {{model_type: llama, vocab_size: 512, hidden_size: {width}, intermediate_size: {intermediate}, num_hidden_layers: {layers},
        num_attention_heads: {heads}, num_key_value_heads: {heads}, max_position_embeddings: {sequence}}}
tokenizer: bytes
datasets: [{{path: text.txt, type: completion}}]
sequence_len: {sequence}
sample_packing: true
micro_batch_size: {rows}
max_steps: {steps}
learning_rate: 1e-3
warmup_steps: 20
weight_decay: 0.1
bf16: true
logging_steps: 1
save_steps: none
resume_from_checkpoint: none
"""
PART = 10


def run(args, folder, name, keys):
    command = [args.phalanx, "train", "job.yaml", "--output_dir", name, *keys]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    return [line["loss"] for line in steps], statistics.median(line["step_ms"] for line in steps[PART:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("texts", nargs="+", type=pathlib.Path)
    for name, default in [("width", 1024), ("layers", 12), ("sequence", 1024), ("rows", 8), ("steps", 200)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args, keys = parser.parse_known_args()
    sizes = {"intermediate": args.width * 11 // 4 // 16 * 16, "heads": max(args.width // 64, 1)}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "text.txt").write_text("\n".join(text.read_text() for text in args.texts))
        job = JOB.format(width=args.width, layers=args.layers, sequence=args.sequence, rows=args.rows, steps=args.steps, **sizes)
        (folder / "job.yaml").write_text(job)
        bf16, fp8 = run(args, folder, "bf16", keys), run(args, folder, "fp8", ["--fp8", "true", *keys])
    worst = 0.0
    for first in range(0, len(bf16[0]), PART):
        a, b = (statistics.mean(losses[first : first + PART]) for losses in (bf16[0], fp8[0]))
        worst = max(worst, abs(b / a - 1))
        print(f"steps {first + 1:4} to {first + PART:4}: bf16 {a:.4f}, fp8 {b:.4f}, {100 * (b / a - 1):+.2f} %")
    print(f"most apart: {100 * worst:.2f} %; a step takes {bf16[1]:.1f} ms in bf16, {fp8[1]:.1f} ms in fp8")
    sys.exit(worst > 0.005 or len(bf16[0]) != len(fp8[0]))


if __name__ == "__main__":
    main()
