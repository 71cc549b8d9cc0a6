"""Loads an exported adapter with PEFT and compares its logits with those of the merged model of the same checkpoint.

usage: check_adapter.py BASE ADAPTER MERGED [--nf4]
BASE is the `base_model` of the run; ADAPTER and MERGED are directories of `phalanx export` without and with `--merge`. With --nf4, the
run was one of `adapter: qlora`: bitsandbytes quantises BASE, with double quantisation. Its rows must be multiples of 64, as Phalanx
leaves other matrices as they are. The mean of all scales is summed in another order, which moves single scales to the next of their
256 codes: 4e-4 of the logits of a model of 800 thousand weights, and the limit is 2e-3.
Exits with 0 if PEFT finds exactly the adapter's tensors in the file and the logits agree within 1e-5 relative; with 77 if PEFT is
not installed.
"""
import json
import pathlib
import sys

try:
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

nf4 = "--nf4" in sys.argv[1:]
base, adapter, merged = (word for word in sys.argv[1:] if word != "--nf4")
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}


def load(directory, quantised=False):
    config = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **NF4)} if quantised else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **config).eval()


failed = []
adapted = PeftModel.from_pretrained(load(base, nf4), adapter).eval()
wanted = set(get_peft_model_state_dict(adapted))
found = set(safe_open(pathlib.Path(adapter) / "adapter_model.safetensors", "pt").keys())
if wanted != found:
    failed.append(f"PEFT has other tensors: {sorted(wanted ^ found)}")

ids = torch.tensor([[i * 7919 % adapted.config.vocab_size for i in range(24)]])
with torch.no_grad():
    ours, theirs = load(merged)(ids).logits.double(), adapted(ids).logits.double()
    apart = (load(base, nf4)(ids).logits.double() - theirs).norm() / theirs.norm()
error = ((ours - theirs).norm() / theirs.norm()).item()
if not error < (2e-3 if nf4 else 1e-5):  # NaN fails too
    failed.append(f"the logits differ by {error:.2e}")
if not apart > 100 * error:
    failed.append(f"the adapter changes the logits by {apart:.2e} only")

config = json.loads((pathlib.Path(adapter) / "adapter_config.json").read_text())
print(f"{len(found)} tensors on {config['target_modules']}: relative error of the logits {error:.1e}, change {apart:.1e}")
print("\n".join(failed), end="")
sys.exit(1 if failed else 0)
