"""Shared by the scripts that run `phalanx train`: a small model on generated text, and access to the run's metrics.

Needs only Python's standard library.
"""

import argparse
import json
import os
import subprocess
import tempfile

JOB = """
model: {{model_type: llama, vocab_size: 512, hidden_size: {hidden_size}, intermediate_size: {intermediate_size},
        num_hidden_layers: {n_layers}, num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: {sequence_len}}}
tokenizer: bytes
datasets: [{{path: text.txt, type: completion}}]
sequence_len: {sequence_len}
micro_batch_size: {micro_batch_size}
microbatches_per_step: 4
learning_rate: 1e-4
threads: 1
bf16: false
save_steps: none
logging_steps: 1
resume_from_checkpoint: none
output_dir: out
"""


def arguments(description, add):
    """Parsed arguments (the program and those that `add` declares), and the rest as keys of the job's configuration."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    add(parser)
    args, overrides = parser.parse_known_args()
    args.phalanx = os.path.abspath(args.phalanx)
    return args, [word for word in overrides if word != "--"]


class Job:
    """A temporary folder with a configuration and its text. Removed on exit."""

    def __init__(self, phalanx, hidden_size=256, n_layers=6, sequence_len=128, micro_batch_size=1, more=""):
        self.train = [phalanx, "train", "job.yaml"]
        sizes = {"hidden_size": hidden_size, "intermediate_size": hidden_size * 11 // 4, "n_layers": n_layers}
        self.yaml = JOB.format(**sizes, sequence_len=sequence_len, micro_batch_size=micro_batch_size) + more

    def __enter__(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.read = {}
        self.folder = self.scratch.name
        with open(f"{self.folder}/job.yaml", "w") as file:
            file.write(self.yaml)
        with open(f"{self.folder}/text.txt", "w") as file:
            file.writelines(f"The {i * i % 977}th hoplite holds the line at {i % 24} o'clock. " for i in range(6000))
        return self

    def __exit__(self, *_):
        self.scratch.cleanup()

    def start(self, *words, stdout=subprocess.DEVNULL):
        return subprocess.Popen([*self.train, *words], cwd=self.folder, stdout=stdout)

    def run(self, *words, stdout=subprocess.DEVNULL):
        subprocess.run([*self.train, *words], cwd=self.folder, stdout=stdout, check=True)

    def steps_ms(self, out="out"):
        """Milliseconds of each reported step."""
        return [line["step_ms"] for line in self.lines(f"{out}/metrics.jsonl") if "step_ms" in line]

    def incidents(self):
        return [line for line in self.lines("out/events.jsonl") if line["event"] == "incident"]

    def lines(self, name):
        """The complete lines of a file of JSON lines that may still be written. Reads only the new part: a caller that polls
        every millisecond would otherwise take ever more of the processor time that it measures."""
        position, lines = self.read.get(name, (0, []))
        try:
            with open(f"{self.folder}/{name}", "rb") as file:
                if file.seek(0, os.SEEK_END) < position:
                    position, lines = 0, []
                file.seek(position)
                whole = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        lines = lines + [json.loads(line) for line in whole[0].splitlines()]
        self.read[name] = (position + len(whole[0]) + len(whole[1]), lines)
        return lines


def ranks(launcher):
    """Process ids of the rank processes of a launcher."""
    found = subprocess.run(["pgrep", "-P", str(launcher), "-f", "rank --worker"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]
