"""Loads an exported reward model with transformers and compares its scores with those of Phalanx.

usage: check_scores.py DIR EXPECTED.json [BASE]
DIR is a model, or an adapter of PEFT on the model BASE. EXPECTED.json: {"rows": [[id, ...], ...], "scores": [...]}
Exits with 0 if the files have exactly the model's weights and the scores of all rows, padded to one length, agree within 1e-5 of
numbers of order 1; with 77 if transformers, or PEFT for an adapter, is not installed.
"""
import json
import sys

try:
    import torch
    from transformers import AutoModelForSequenceClassification
    if len(sys.argv) > 3:
        from peft import PeftModel
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

directory, expected = sys.argv[1], json.load(open(sys.argv[2]))
failed = []
told = {"dtype": torch.float32}
if len(sys.argv) > 3:
    base = AutoModelForSequenceClassification.from_pretrained(sys.argv[3], num_labels=1, **told)
    base.config.pad_token_id = expected["pad"]
    model = PeftModel.from_pretrained(base, directory)
    if model.peft_config["default"].task_type != "SEQ_CLS":
        failed.append(f"task {model.peft_config['default'].task_type}")
else:
    model, info = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True, **told)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            failed.append(f"{kind}: {sorted(map(str, info[kind]))}")
    if model.config.num_labels != 1 or model.config.pad_token_id != expected["pad"]:
        failed.append(f"{model.config.num_labels} labels, padding {model.config.pad_token_id}")

longest = max(map(len, expected["rows"]))
rows = torch.tensor([row + [expected["pad"]] * (longest - len(row)) for row in expected["rows"]])
with torch.no_grad():
    scores = model.eval()(rows).logits[:, 0].double()
wanted = torch.tensor(expected["scores"], dtype=torch.float64)
error = (scores - wanted).abs().max().item()
if not error < 1e-5:  # NaN fails too
    failed.append(f"the scores differ by {error:.2e}: {scores.tolist()}, expected {wanted.tolist()}")
print(f"{type(model).__name__}: largest difference of {len(wanted)} scores {error:.1e}")
print("\n".join(failed), end="")
sys.exit(1 if failed else 0)
