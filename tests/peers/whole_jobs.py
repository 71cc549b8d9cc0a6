"""Shared by the scripts that interrupt whole jobs: a reproducible job of two ranks, and what is left of it.

Needs only Python's standard library.
"""

import json
import time

JOB = """model: {{model_type: llama, vocab_size: 264, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 128}}
tokenizer: bytes
datasets: [{{path: text.txt, type: completion}}]
sequence_len: 128
micro_batch_size: 2
max_steps: {steps}
save_steps: none
logging_steps: 1000
dp_replicate_size: 2
reproducible: true
threads: 1
device: cpu
output_dir: out
"""


def until(what, condition, patience, interval=0.1):
    end = time.time() + patience
    while time.time() < end:
        if found := condition():
            return found
        time.sleep(interval)
    raise SystemExit(f"timed out: {what}")


class Folder:
    """The folder `dir` of a job."""

    def write(self, steps):
        text = "".join(f"The {i * i % 977}th hoplite holds the line. " for i in range(6000))
        (self.dir / "text.txt").write_text(text)
        (self.dir / "job.yaml").write_text(JOB.format(steps=steps))

    def step(self):
        """The last step of the job's measurements."""
        try:
            lines = (self.dir / "out/metrics.jsonl").read_text().splitlines()
            return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
        except FileNotFoundError:
            return 0

    def weights(self):
        return (self.dir / "out/model/model.safetensors").read_bytes()
