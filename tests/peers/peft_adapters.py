"""Compares the loss of adapters that PEFT writes with PEFT's own, for every setting of LoraConfig that changes what is computed.

usage: peft_adapters.py PHALANX LLAMA QWEN2 GPT2
PHALANX is the binary; the others are small model directories with tokenizer.json: the first without and the second with tied
embeddings. Each adapter is made by PEFT with random matrices, saved, and evaluated by both on one text.
Exits with 0 if each adapter has PEFT's loss within 2e-5 or is refused with exit code 2; with 77 if PEFT is not installed.
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

try:
    import torch
    from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

TEXT = "Once upon a time there was a little girl named Lily who liked to play outside."
TOLERANCE = 2e-5

phalanx, *models = sys.argv[1:]
phalanx, models = str(pathlib.Path(phalanx).resolve()), [pathlib.Path(m).resolve() for m in models]
llama, qwen2, gpt2 = models
work = pathlib.Path(tempfile.mkdtemp(prefix="peft-adapters-"))


def lora(**changes):
    return LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **changes})


CASES = {
    "plain": (llama, lora()),
    "rank-stabilised": (llama, lora(use_rslora=True)),
    "lengths": (llama, lora(use_dora=True)),
    "patterns": (llama, lora(rank_pattern={"layers.0.self_attn.q_proj": 2, "v_proj": 8}, alpha_pattern={"q_proj": 3})),
    "all linear": (llama, lora(target_modules="all-linear")),
    "regular expression": (llama, lora(target_modules=r".*\.0\..*(q_proj|up_proj)")),
    "excluded": (llama, lora(exclude_modules=["layers.0.self_attn.q_proj"])),
    "one layer": (llama, lora(layers_to_transform=1, layers_pattern="layers")),
    "head": (llama, lora(target_modules=["q_proj", "lm_head"])),
    "embedding": (llama, lora(target_modules=["q_proj", "embed_tokens"])),
    "embedding with lengths": (llama, lora(target_modules=["embed_tokens", "q_proj"], use_dora=True)),
    "norms": (llama, lora(modules_to_save=["norm"])),
    "feed-forward parts": (llama, lora(modules_to_save=["mlp"])),
    "all biases": (qwen2, lora(bias="all")),
    "biases of adapted modules": (qwen2, lora(bias="lora_only")),
    "biases of matrices": (qwen2, lora(lora_bias=True)),
    "tied embedding": (qwen2, lora(target_modules=["embed_tokens"])),
    "tied head": (qwen2, lora(target_modules=["lm_head"])),
    "tied embedding, trained whole": (qwen2, lora(modules_to_save=["embed_tokens"])),
    "weights stored in columns": (gpt2, lora(target_modules=["c_attn", "c_proj"], bias="all")),
    "positions": (gpt2, lora(target_modules=["wpe"])),
    **{f"init {init}": (llama, lora(init_lora_weights=init)) for init in ["gaussian", "orthogonal", "mica", "pissa", "olora", False]},
    "repeated layers": (llama, lora(layer_replication=[[0, 2], [1, 2]])),
    "trained rows": (llama, lora(trainable_token_indices=[1, 2, 3])),
    "invoked by tokens": (llama, lora(alora_invocation_tokens=[1, 2])),
    "parameters": (llama, lora(target_modules=[], target_parameters=["q_proj.weight"])),
    "IA3": (llama, IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])),
    "LoHa": (llama, LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])),
}


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def loss_of_peft(base, adapter, ids):
    model = PeftModel.from_pretrained(load(base), adapter).eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()


def token_lists(base):
    """The text with and without the tokens that a tokenizer may add around it."""
    ids = AutoTokenizer.from_pretrained(base)(TEXT, add_special_tokens=False)["input_ids"]
    config = json.loads((base / "config.json").read_text())
    first, last = config.get("bos_token_id"), config.get("eos_token_id")
    around = [([], []), ([first], []), ([], [last]), ([first], [last])]
    return [a + ids + b for a, b in around if all(isinstance(i, int) for i in a + b)]


def compare(name, base, config):
    adapter = work / name.replace(" ", "-")
    torch.manual_seed(0)
    model = get_peft_model(load(base), config)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(adapter)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    job = work / "job.yaml"
    job.write_text(
        f"base_model: {base}\ndatasets: [{{path: {work}/text.jsonl, type: completion}}]\nsequence_len: 64\n"
        f"micro_batch_size: 1\nmax_steps: 1\noutput_dir: {work}/out\n"
    )
    run = subprocess.run([phalanx, "eval", job, "--model", adapter, "--json"], capture_output=True, text=True)
    if run.returncode == 2:
        print(f"{name}: refused: {run.stderr.strip()}")
        return True
    found = json.loads(run.stdout.splitlines()[0])["loss"]
    expected = min((loss_of_peft(base, adapter, ids) for ids in token_lists(base)), key=lambda loss: abs(loss - found))
    print(f"{name}: {found:.6f}, PEFT {expected:.6f}")
    return abs(found - expected) <= TOLERANCE


(work / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
failed = [name for name, (base, config) in CASES.items() if not compare(name, base, config)]
shutil.rmtree(work)
if failed:
    sys.exit(f"differ from PEFT: {', '.join(failed)}")
