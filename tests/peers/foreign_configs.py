#!/usr/bin/env python3
"""Converts configurations of Accelerate, DeepSpeed, torchtitan or Axolotl and runs the results.

usage: foreign_configs.py FILE... [--phalanx BINARY] [--train]

Each FILE is given to `phalanx init --from`; nothing is changed in the result, whose small model and `data.txt` are those of `init`. It
is then given to `phalanx estimate` and, with --train, to `phalanx train --max_steps 1`. Prints a line for each file with the mesh, the
ZeRO stage and the precision that it was converted to. Exits with 1 if a file is converted to something that does not run, or fails
without a sentence (exit code other than 2). Needs only Python's standard library.
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

AXES = ["dp_replicate", "dp_shard", "tensor_parallel", "context_parallel", "pipeline_parallel"]
SHOWN = [*(f"{axis}_size" for axis in AXES), "zero_stage", "offload_optimizer", "bf16", "fp16"]


def shown(job):
    """The keys that matter, as the file sets them."""
    found = re.findall(r"^(\w+): (.*)$", job, re.MULTILINE)
    return ", ".join(f"{key} {value}" for key, value in found if key in SHOWN)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--phalanx", default="target/release/phalanx")
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args()
    program = pathlib.Path(args.phalanx).resolve()
    ok, broken = 0, 0
    for path in map(pathlib.Path, args.files):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "data.txt").write_text("".join(f"The {i}th hoplite holds the line. " for i in range(4000)))
            steps = {
                "init": ["init", "--yes", "--from", str(path.resolve()), "job.yaml"],
                "estimate": ["estimate", "job.yaml"],
                "train": ["train", "job.yaml", "--max_steps", "1"],
            }
            if not args.train:
                del steps["train"]
            for name, words in steps.items():
                run = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True)
                if run.returncode:
                    # A file that is refused is read by a person; one that is converted must run.
                    broken += name != "init" or run.returncode != 2
                    last = (run.stderr.strip().splitlines() or ["no sentence"])[-1]
                    print(f"{path.name}: {name} ends with {run.returncode}: {last}", flush=True)
                    break
            else:
                ok += 1
                print(f"{path.name}: {' and '.join(steps)}: {shown((folder / 'job.yaml').read_text())}", flush=True)
    print(f"{ok} of {len(args.files)} run")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
