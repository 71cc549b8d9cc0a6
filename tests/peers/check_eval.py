"""Compares `phalanx eval` with transformers: the loss over the paragraphs of the reference text, for models or adapters.

usage: check_eval.py PHALANX MODEL...

Each paragraph is a document: the tokenizer's special tokens, the text, and the end-of-text token; all tokens but the first are
predicted. Exits with 1 if a loss differs by more than 2e-6 relative.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = pathlib.Path(__file__).parent.parent / "reference/text.txt"


def by_phalanx(phalanx, model, documents, folder):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    sequence_len = min(512, config.get("max_position_embeddings", config.get("n_positions", 512)))
    job = folder / "eval.yaml"
    job.write_text(
        f"base_model: {model}\ndatasets:\n  - path: {data}\n    type: completion\nsequence_len: {sequence_len}\n"
        f"micro_batch_size: 2\nsample_packing: true\nmax_steps: 1\nbf16: false\noutput_dir: {folder / 'out'}\n"
    )
    command = [phalanx, "eval", "--json", "--model", model, job]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def by_transformers(model, documents):
    tokenizer = AutoTokenizer.from_pretrained(model)
    # An adapter's directory names its base model; transformers loads both.
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, n_predicted = 0.0, 0
    for text in documents:
        ids = tokenizer(text)["input_ids"]
        if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
            ids = ids + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        n_predicted += len(ids) - 1
    return total / n_predicted, n_predicted


def main():
    phalanx, *models = sys.argv[1:]
    # Short enough for every model: what does not fit is cut into several samples.
    documents = [text.strip()[:80] for text in TEXT.read_text().split("\n\n") if text.strip()]
    is_equal = bool(models)
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            found = by_phalanx(phalanx, model, documents, pathlib.Path(folder))
        loss, n_predicted = by_transformers(model, documents)
        error = abs(found["loss"] / loss - 1)
        print(
            f"{model}: loss {found['loss']:.7f}, transformers {loss:.7f} ({error:.1e}); perplexity {found['perplexity']:.4f}, "
            f"{math.exp(loss):.4f}; tokens {found['predicted_tokens']}, {n_predicted}"
        )
        is_equal &= error < 2e-6 and found["predicted_tokens"] == n_predicted
    sys.exit(0 if is_equal else 1)


main()
