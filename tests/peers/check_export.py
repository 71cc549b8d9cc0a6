"""Loads an exported directory with transformers and compares its logits with those that Phalanx computed.

usage: check_export.py DIR LOGITS.json      LOGITS.json: {"ids": [...], "logits": [... of the last position]}
Exits 0 when they agree within 1e-4 relative, 77 when transformers is not installed.
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
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(torch.tensor([expected["ids"]])).logits[0, -1].double()
wanted = torch.tensor(expected["logits"], dtype=torch.float64)
error = ((logits - wanted).norm() / wanted.norm()).item()
tokenizer = AutoTokenizer.from_pretrained(directory)
ids = tokenizer("Once upon a time, there was a dragon.")["input_ids"]
print(f"relative error of the logits {error:.2e}; {len(ids)} ids: {ids}")
if "text_ids" in expected and ids != expected["text_ids"]:
    print(f"the tokenizer disagrees: expected {expected['text_ids']}")
    sys.exit(1)
sys.exit(0 if error < 1e-4 else 1)
