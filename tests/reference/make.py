"""Generates the reference models of this folder and computes PyTorch's numbers for them.

usage: make.py [--out DIR] [NAME ...]        (default: this folder, everything)

Writes, for every name, below DIR:
  models/NAME/            a Hugging Face directory: config.json, model.safetensors (bf16), the tokenizer's files
  numbers/NAME.json       hyperparameters, logits, and the curves of four runs of PyTorch: in float32, in float64, and with
                          bf16 and fp16 autocast over float32 weights
  numbers/NAME.safetensors  every weight after the last step of the float64 run, rounded to float32
The runs of optimizers other than AdamW are numbers/tiny-llama3-OPTIMIZER.*, from the weights of models/tiny-llama3. Those of
adapters are numbers/NAME-lora.* and NAME-dora.*, from the weights of models/NAME; PEFT computes them.

The seed is fixed: the models have the same bytes on every machine; the numbers agree to the rounding of sums.
"""
import argparse
import hashlib
import json
import math
import pathlib
import shutil

import numpy
import peft
import tokenizers
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
SEED = 20261122
VOCAB = 352

# Standard deviations of the initial values. They are large enough to detect a missing term: attention is far from uniform
# (rotary embedding, window, multiplier), and norms and biases are far from 1 and 0.
MATRIX_STD, NORM_STD, BIAS_STD = 0.12, 0.1, 0.1

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": MATRIX_STD,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


# name: (configuration class, its fields, vocabulary). The distinguishing features of each family are on; other fields are as in
# SHAPE.
MODELS = {
    "tiny-llama2": ("LlamaConfig", SHAPE | {
        "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_parameters": rope(10000.0)}, "pieces"),
    "tiny-llama3": ("LlamaConfig", SHAPE | {
        "head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, "bytes-bos"),
    "tiny-mistral": ("MistralConfig", SHAPE | {
        "rms_norm_eps": 1e-5, "rope_parameters": rope(10000.0), "sliding_window": 24}, "pieces"),
    "tiny-qwen2": ("Qwen2Config", SHAPE | {
        "rms_norm_eps": 1e-6, "rope_parameters": rope(1000000.0), "tie_word_embeddings": True}, "bytes"),
    "tiny-qwen3": ("Qwen3Config", SHAPE | {
        "head_dim": 16, "rms_norm_eps": 1e-6, "rope_parameters": rope(1000000.0)}, "bytes"),
    "tiny-gpt2": ("GPT2Config", {
        "vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 128, "n_positions": 96,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": MATRIX_STD}, "bytes"),
    "tiny-phi3": ("Phi3Config", SHAPE | {
        "rms_norm_eps": 1e-5, "rope_parameters": rope(10000.0), "sliding_window": 24,
        "original_max_position_embeddings": 256}, "pieces"),
    "tiny-olmo2": ("Olmo2Config", SHAPE | {"rms_norm_eps": 1e-6, "rope_parameters": rope(500000.0)}, "bytes"),
    "tiny-granite": ("GraniteConfig", SHAPE | {
        "rms_norm_eps": 1e-5, "rope_parameters": rope(10000.0), "tie_word_embeddings": True, "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0}, "bytes"),
}

RUN = {"seq": 64, "batch": 4, "steps": 8, "warmup": 2, "min_lr_ratio": 0.1, "clip_norm": 1.0}
# The hyperparameters of each optimizer. AdamW's eps is 1e-6 because of the biases of keys: softmax is invariant to them, so
# their gradient is only rounding error. With 1e-8 they would follow it, and runs with other orders of sums could not be compared
# element by element. Adafactor's eps1 is torch's value for float32, in both runs.
OPTIMIZERS = {
    "adamw": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "wd": 0.1},
    "sgd": {"lr": 0.5, "momentum": 0.9, "wd": 0.01},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "wd": 0.3},
    "adafactor": {"lr": 1e-2, "beta2_decay": -0.8, "eps1": 2.0**-23, "eps2": 1e-3, "d": 1.0, "wd": 0.1},
}
# Adapters: the keys of Phalanx's configuration, which are translated to PEFT's below. A model stored as [in, out], and one with
# its own head.
ADAPTERS = {
    "tiny-qwen3-lora": {
        "lora_r": 4, "lora_alpha": 6.0, "lora_target_modules": r".*\.(q|v|down)_proj|model\.layers\.1\.self_attn\.o_proj",
        "lora_modules_to_save": ["lm_head"], "peft_use_rslora": True, "loraplus_lr_ratio": 4.0},
    "tiny-gpt2-lora": {
        "lora_r": 3, "lora_alpha": 12.0, "lora_target_modules": ["c_attn", "mlp.c_proj"], "peft_layers_to_transform": [1],
        "lora_modules_to_save": ["ln_f"]},
    # With biases, and adapters that add to the residual stream.
    "tiny-qwen2-dora": {
        "lora_r": 4, "lora_alpha": 6.0, "lora_target_modules": ["q_proj", "v_proj", "down_proj"], "peft_use_dora": True},
    "tiny-gpt2-dora": {
        "lora_r": 3, "lora_alpha": 12.0, "lora_target_modules": ["c_attn", "mlp.c_proj"], "peft_use_dora": True},
}
# The seed of a job that sets none, from which adapters are drawn.
ADAPTER_SEED = 42
PROMPT_LEN = 48
# The loss scale of fp16 in the first step, and the steps after which it doubles.
LOSS_SCALE, LOSS_SCALE_WINDOW = 256.0, 3


# The vocabularies. ---------------------------------------------------------------------------------------------------


def byte_level(text, starts_with_bos):
    """Byte-level BPE, as in Llama 3, GPT-2, Qwen and others; only Llama 3 starts a document with a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=specials, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if starts_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 0)])
    return tokenizer, {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}


def pieces(text):
    """BPE over characters with bytes as the fallback, a space before the text, BOS first: Llama 2, Mistral, Phi-3."""
    specials = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(specials + fallback), show_progress=False)
    trained.train_from_iterator(text.splitlines(), trainer)  # so that the end of a line becomes a byte, not a character
    bpe = json.loads(trained.to_str())["model"]
    ordered = specials + fallback + sorted(bpe["vocab"], key=bpe["vocab"].get)
    merges = [tuple(merge) for merge in bpe["merges"]]
    vocab = {token: index for index, token in enumerate(ordered)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def vocabulary(kind, text):
    tokenizer, specials = pieces(text) if kind == "pieces" else byte_level(text, kind == "bytes-bos")
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    sample = text + " 語 — naïve\t🙂"
    assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    return tokenizer, specials


# The models. ---------------------------------------------------------------------------------------------------------


def initial(name, parameter, tensor):
    """Normal values, exact in bf16, from a generator per parameter, so that no value depends on other models."""
    digest = hashlib.sha256(f"{SEED}/{name}/{parameter}".encode()).digest()
    values = numpy.random.Generator(numpy.random.PCG64(int.from_bytes(digest[:8], "little")))
    normal = torch.from_numpy(values.standard_normal(tensor.shape))
    if parameter.endswith(".bias"):
        normal *= BIAS_STD
    elif tensor.dim() == 1:
        normal = 1.0 + NORM_STD * normal
    else:
        normal *= MATRIX_STD
    return normal.to(torch.bfloat16).float()


def make_model(name, text, out):
    """Writes the directory of a model."""
    class_name, fields, kind = MODELS[name]
    tokenizer, specials = vocabulary(kind, text)
    ids_of = {f"{role}_id": tokenizer.token_to_id(token) for role, token in specials.items()}
    special_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | ids_of
    special_ids.pop("unk_token_id", None)
    config = getattr(transformers, class_name)(**fields, **special_ids)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            tensor.copy_(initial(name, parameter, tensor))
    folder = out / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256} | specials
    if config.model_type == "qwen2":
        # transformers reads every model of this family with its class, which would add a token for this role.
        settings["unk_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


# The numbers. --------------------------------------------------------------------------------------------------------


def load(out, name, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "models" / name, dtype=torch.float32)
    return model.to(dtype)


def encode(out, name, text):
    return Tokenizer.from_file(str(out / "models" / name / "tokenizer.json")).encode(text).ids


def logits(model, ids):
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].double()
    following = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "input_ids": ids,
        "last_position": rows[-1].tolist(),
        "sum_of_squares": rows.square().sum().item(),
        "sum_of_squares_of_each_position": rows.square().sum(dim=1).tolist(),
        "logit_of_the_next_id": following.tolist(),
    }


class Lion(torch.optim.Optimizer):
    """Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2 (arXiv:2302.06675)."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (beta1 * momentum + (1 - beta1) * p.grad).sign()
                p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def optimizer_of(kind, groups, h):
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=h["lr"], betas=h["betas"], eps=h["eps"], foreach=False)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=h["lr"], momentum=h["momentum"], foreach=False)
    if kind == "lion":
        return Lion(groups, h["lr"], h["betas"])
    eps = (h["eps1"], h["eps2"])
    return torch.optim.Adafactor(groups, lr=h["lr"], beta2_decay=h["beta2_decay"], eps=eps, d=h["d"], foreach=False)


def learning_rate(peak, t):
    if t < RUN["warmup"]:
        return peak * (t + 1) / RUN["warmup"]
    progress = (t - RUN["warmup"]) / (RUN["steps"] - RUN["warmup"])
    floor = RUN["min_lr_ratio"]
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


# Adapters. -----------------------------------------------------------------------------------------------------------


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def fork(key, name):
    """The stream of that name, as in strategies/src/rng.rs."""
    stream = 0xCBF29CE484222325
    for byte in name.encode():
        stream = (stream ^ byte) * 0x100000001B3 % 2**64
    return mix(key ^ mix((stream + 0xD1B54A32D192ED03) % 2**64))


def normal(key, i):
    u, v = (((mix((key + at * 0x9E3779B97F4A7C15) % 2**64) >> 11) + 0.5) / 2**53 for at in (2 * i, 2 * i + 1))
    return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)


def adapted(model, keys, task="CAUSAL_LM"):
    """The model with PEFT's adapters, which begin as those of Phalanx."""
    names = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules",
             "lora_modules_to_save": "modules_to_save", "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora",
             "peft_layers_to_transform": "layers_to_transform"}
    config = {names[key]: value for key, value in keys.items() if key in names}
    is_gpt2 = model.config.model_type == "gpt2"
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, fan_in_fan_out=is_gpt2, **config))
    init = fork(mix((ADAPTER_SEED + 0x9E3779B97F4A7C15) % 2**64), "init")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_A." in name:
                stream = fork(init, name.removeprefix("base_model.model.").replace(".default", ""))
                drawn = torch.tensor([normal(stream, i) for i in range(tensor.numel())], dtype=torch.float64)
                # The deviation of PEFT's own distribution.
                std = numpy.float32(1) / numpy.sqrt(numpy.float32(3) * numpy.float32(tensor.shape[1]))
                tensor.copy_((drawn.float() * torch.tensor(std)).view_as(tensor))
    return model


def drawn_head(n, std):
    """The weights with which Phalanx begins a head of scores."""
    stream = fork(fork(mix((ADAPTER_SEED + 0x9E3779B97F4A7C15) % 2**64), "init"), "score.weight")
    return torch.tensor([[numpy.float32(std) * numpy.float32(normal(stream, i)) for i in range(n)]])


def decays(name, p):
    """As in transformers' trainer, which exempts biases and norms: DoRA's lengths decay."""
    return p.dim() >= 2 or ".lora_magnitude_vector." in name


def optimizer_of_model(model, kind, keys):
    h = OPTIMIZERS[kind]
    if "loraplus_lr_ratio" in keys:
        return create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=h["lr"], loraplus_lr_ratio=keys["loraplus_lr_ratio"],
            loraplus_weight_decay=h["wd"], betas=h["betas"], eps=h["eps"], foreach=False)
    trained = [(decays(name, p), p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for decayed, p in trained if decayed == one], "weight_decay": h["wd"] if one else 0.0}
              for one in (True, False)]
    return optimizer_of(kind, groups, h)


# Training. -----------------------------------------------------------------------------------------------------------


def train(model, ids, kind, keys, autocast=None):
    """Trains, with autocast to a type if one is given, and returns the curve and the final weights."""
    h = OPTIMIZERS[kind]
    optimizer = optimizer_of_model(model, kind, keys)
    ratios = [group["lr"] / h["lr"] for group in optimizer.param_groups]
    rows = torch.tensor(ids[: len(ids) // RUN["seq"] * RUN["seq"]]).view(-1, RUN["seq"])
    assert len(rows) >= RUN["steps"] * RUN["batch"], f"{len(rows)} rows are too few"
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=LOSS_SCALE, growth_interval=LOSS_SCALE_WINDOW, enabled=autocast == torch.float16)
    curve = []
    for t in range(RUN["steps"]):
        batch = rows[t * RUN["batch"] : (t + 1) * RUN["batch"]]
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            predicted = model(batch).logits[:, :-1].reshape(-1, VOCAB)
            loss = torch.nn.functional.cross_entropy(predicted, batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RUN["clip_norm"], foreach=False)
        lr = learning_rate(h["lr"], t)
        for group, ratio in zip(optimizer.param_groups, ratios):
            group["lr"] = lr * ratio
        scaler.step(optimizer)
        scaler.update()
        curve.append({"step": t + 1, "lr": lr, "loss": loss.item(), "grad_norm": norm.item()})
    trained = peft.get_peft_model_state_dict(model) if keys else dict(model.named_parameters())
    return curve, {name: p.detach().clone() for name, p in trained.items()}


def make_numbers(name, kind, text, out):
    keys = ADAPTERS.get(name, {})
    model_name = name.removesuffix("-lora").removesuffix("-dora").removesuffix(f"-{kind}")
    ids = encode(out, model_name, text)
    numbers = {
        "model": model_name,
        "optimizer": kind,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__,
                      "tokenizers": tokenizers.__version__} | ({"peft": peft.__version__} if keys else {}),
        "hyperparameters": RUN | OPTIMIZERS[kind] | {
            "schedule": "linear warmup lr*(t+1)/warmup for t < warmup, then a cosine to min_lr_ratio*lr at t = steps; "
                        "t counts from 0",
            "batch_order": "the ids of the whole text, with BOS first where the tokenizer adds it, cut into rows of seq; "
                           "step t takes rows t*batch to (t+1)*batch; the loss is the mean over batch*(seq-1) predictions",
            "weight_decay_on": "tensors with two or more dimensions"
                               + (", and lora_magnitude_vector" if "peft_use_dora" in keys else ""),
            "clip": "global L2 norm"},
    }
    if keys:
        numbers["adapter"] = keys
    is_whole = kind == "adamw" and not keys
    ends = {}
    for dtype in (torch.float32, torch.float64):
        model = load(out, model_name, dtype)
        if keys:
            model = adapted(model, keys).to(dtype)
        if dtype == torch.float64 and is_whole:
            numbers["logits"] = logits(model, ids[100 : 100 + PROMPT_LEN])
        curve, ends[dtype] = train(model, ids, kind, keys)
        numbers[str(dtype).removeprefix("torch.")] = {"curve": curve}
    if is_whole:
        for dtype in (torch.bfloat16, torch.float16):
            curve, _ = train(load(out, model_name, torch.float32), ids, kind, keys, autocast=dtype)
            numbers[str(dtype).removeprefix("torch.")] = {"curve": curve}
    single, double = ends[torch.float32], ends[torch.float64]
    # The distance between PyTorch's two runs at the end, as the scale for other implementations.
    numbers["largest_distance_of_a_final_weight"] = {
        parameter: (single[parameter].double() - weight).abs().max().item() for parameter, weight in double.items()}
    folder = out / "numbers"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    final = {parameter: weight.float().contiguous() for parameter, weight in double.items()}
    save_file(final, folder / f"{name}.safetensors", {"format": "pt"})
    first, last = (numbers["float64"]["curve"][i]["loss"] for i in (0, -1))
    apart, where = max((apart, name) for name, apart in numbers["largest_distance_of_a_final_weight"].items())
    norms = [round(step["grad_norm"], 2) for step in numbers["float64"]["curve"]]
    print(f"{name}: loss {first:.3f} -> {last:.3f}, gradient norms {norms}, runs apart {apart:.1e} in {where}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    others = [f"tiny-llama3-{kind}" for kind in OPTIMIZERS if kind != "adamw"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*MODELS, *others, *ADAPTERS]))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    text = (HERE / "text.txt").read_text()
    for name in args.names or [*MODELS, *others, *ADAPTERS]:
        if name in MODELS:
            make_model(name, text, args.out)
            make_numbers(name, "adamw", text, args.out)
        elif name in ADAPTERS:
            make_numbers(name, "adamw", text, args.out)
        else:
            make_numbers(name, name.rpartition("-")[2], text, args.out)


if __name__ == "__main__":
    main()
