"""Loads an exported directory with transformers and compares it with what Phalanx computed from the same weights.

usage: check_export.py DIR EXPECTED.json
EXPECTED.json: {"ids": [...], "logits": [... of the last position], "text": "...", "text_ids": [...]}
Exits with 0 if the files have exactly the model's weights, the logits agree within 1e-4 relative, and the tokenizer gives
the same ids; with 77 if transformers is not installed.
"""
import json
import sys

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

directory, expected = sys.argv[1], json.load(open(sys.argv[2]))
failed = []

model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    if info[kind]:
        failed.append(f"{kind}: {sorted(map(str, info[kind]))}")

with torch.no_grad():
    logits = model.eval()(torch.tensor([expected["ids"]])).logits[0, -1].double()
wanted = torch.tensor(expected["logits"], dtype=torch.float64)
error = ((logits - wanted).norm() / wanted.norm()).item()
if not error < 1e-4:  # NaN fails too
    failed.append(f"the logits differ by {error:.2e}")

tokenizer = AutoTokenizer.from_pretrained(directory)
ids = tokenizer(expected["text"], add_special_tokens=False)["input_ids"]
if ids != expected["text_ids"]:
    failed.append(f"the tokenizer gives {ids}, expected {expected['text_ids']}")
if tokenizer.decode(ids) != expected["text"]:
    failed.append(f"the tokenizer decodes to {tokenizer.decode(ids)!r}")

print(f"{type(model).__name__}: relative error of the logits {error:.1e}, {len(ids)} ids of the text")
print("\n".join(failed), end="")
sys.exit(1 if failed else 0)
