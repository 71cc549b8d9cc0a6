"""Computes PyTorch's numbers for texts whose tokens count more or less.

usage: weighted.py [--out DIR] [NAME ...]        (default: this folder, everything)

Writes numbers/NAME.json, below DIR, for every name: the keys of a job of Phalanx with its tokenised records, and for each step of a plain
loop of PyTorch over the same records, from the same weights and adapters: the loss, which is that of `cross_entropy` with a weight for
each token, divided by the sum of the weights of all rows of the step, and the norm of the gradient before it is clipped.
"""
import argparse
import json
import pathlib
import random

import peft
import torch
import transformers
from make import HERE, adapted

RUN = {"steps": 10, "batch": 4, "lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "wd": 0.0, "clip_norm": 1.0}
KEYS = {"datasets.0.type": "tokenized", "loss_weights": True}
WEIGHTS = [0, 0.1, 0.5, 1, 1, 2.75, 40]
ADAPTER = {"lora_r": 4, "lora_alpha": 8.0, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}

# name: (model, adapter, keys besides KEYS).
CASES = {
    "tiny-llama3-weighted-whole": ("tiny-llama3", {}, {}),
    "tiny-qwen3-weighted": ("tiny-qwen3", ADAPTER, {}),
    "tiny-llama3-weighted-packed": ("tiny-llama3", ADAPTER, {"sample_packing": True, "sample_packing_sequentially": True}),
}
# Rows of a packed job hold two texts each, in their order: no three fit.
LENGTHS, PACKED = (8, 60), (36, 47)


def records(tokenizer, lengths, n):
    """Pieces of the text; some tokens of each have no label, others count little, much or not at all."""
    draw = random.Random(7)
    ids = tokenizer((HERE / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    rows = []
    for _ in range(n):
        length = draw.randint(*lengths)
        at = draw.randrange(len(ids) - length)
        row = ids[at : at + length]
        labels = [-100 if draw.random() < 0.2 else token for token in row]
        rows.append({"input_ids": row, "labels": labels, "loss_weights": [draw.choice(WEIGHTS) for _ in row]})
    return rows


def step(model, optimizer, rows):
    optimizer.zero_grad()
    losses, weights = [], []
    for row in rows:
        ids, labels, weight = (torch.tensor(row[key]) for key in ("input_ids", "labels", "loss_weights"))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        losses.append((torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none") * weight[1:]).sum())
        weights.append(weight[1:][labels[1:] != -100].sum())
    loss = sum(losses) / sum(weights)
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, RUN["clip_norm"])
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm.item()}


def make(name, out):
    model_name, adapter, keys = CASES[name]
    folder = out / "models" / model_name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = adapted(model, adapter, "CAUSAL_LM") if adapter else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RUN["lr"], betas=RUN["betas"], eps=RUN["eps"], weight_decay=RUN["wd"])
    per_row = 2 if "sample_packing" in keys else 1
    per_step = RUN["batch"] * per_row
    rows = records(tokenizer, PACKED if per_row == 2 else LENGTHS, per_step * RUN["steps"])
    curve = [step(model, optimizer, rows[i : i + per_step]) for i in range(0, len(rows), per_step)]
    numbers = {
        "model": model_name, "made_with": {package.__name__: package.__version__ for package in (torch, transformers, peft)},
        "hyperparameters": RUN, "keys": KEYS | keys, "adapter": adapter, "template": "{{ messages }}", "records": rows, "curve": curve,
    }
    (out / "numbers" / f"{name}.json").write_text(json.dumps(numbers) + "\n")
    print(f"{name}: loss {curve[0]['loss']:.4f} -> {curve[-1]['loss']:.4f}, norms {[round(s['grad_norm'], 3) for s in curve]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in args.names or CASES:
        make(name, args.out)


if __name__ == "__main__":
    main()
