"""Computes TRL's numbers for preference tuning of this folder's models.

usage: preference.py [--out DIR] [NAME ...]        (default: this folder, everything)

Writes numbers/NAME.json, below DIR, for every name: the keys of a job of Phalanx, and for each step of TRL's own trainer on
the same pairs, from the same weights and adapters: loss, norm of the gradient before it is clipped, and what TRL logs beside them.
pairs.jsonl has the pairs as texts; conversations are made of the same texts.
"""
import argparse
import json
import pathlib
import tempfile

import datasets
import peft
import torch
import transformers
import trl
from make import HERE, adapted, drawn_head
from trl.experimental import cpo, orpo

ADAPTER = {"lora_r": 4, "lora_alpha": 8.0, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}
GPT2_ADAPTER = {"lora_r": 3, "lora_alpha": 12.0, "lora_target_modules": ["c_attn", "mlp.c_proj"]}
RUN = {"steps": 4, "batch": 4, "lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "wd": 0.1, "clip_norm": 1.0}
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}")

TRAINERS = {
    "dpo": (trl.DPOConfig, trl.DPOTrainer), "cpo": (cpo.CPOConfig, cpo.CPOTrainer), "orpo": (orpo.ORPOConfig, orpo.ORPOTrainer),
    "kto": (trl.KTOConfig, trl.KTOTrainer), "reward": (trl.RewardConfig, trl.RewardTrainer)}

# name: (model, trainer, what the trainer is told, the same in keys of Phalanx, form of the data).
CASES = {
    "tiny-qwen3-dpo": ("tiny-qwen3", "dpo", {"beta": 0.3}, {"rl": "dpo", "rl_beta": 0.3}, "texts"),
    "tiny-llama3-dpo": ("tiny-llama3", "dpo", {"beta": 0.1}, {"rl": "dpo"}, "texts"),
    "tiny-gpt2-ipo": ("tiny-gpt2", "dpo", {"beta": 0.5, "loss_type": ["ipo"]}, {"rl": "ipo", "rl_beta": 0.5}, "texts"),
    "tiny-llama3-dpo-whole": ("tiny-llama3", "dpo", {"beta": 0.3}, {"rl": "dpo", "rl_beta": 0.3}, "texts"),
    "tiny-gpt2-dpo-whole": ("tiny-gpt2", "dpo", {"beta": 0.1}, {"rl": "dpo"}, "texts"),
    "tiny-qwen3-dpo-messages": ("tiny-qwen3", "dpo", {"beta": 0.3}, {"rl": "dpo", "rl_beta": 0.3}, "messages"),
    "tiny-qwen3-dpo-implicit": ("tiny-qwen3", "dpo", {"beta": 0.3}, {"rl": "dpo", "rl_beta": 0.3}, "implicit"),
    "tiny-qwen3-dpo-truncated": (
        "tiny-qwen3", "dpo", {"beta": 0.3, "max_length": 24},
        {"rl": "dpo", "rl_beta": 0.3, "sequence_len": 24, "excess_length_strategy": "truncate"}, "texts"),
}
for loss, told in {
    "hinge": {}, "exo_pair": {"label_smoothing": 0.1}, "nca_pair": {}, "robust": {"label_smoothing": 0.2}, "bco_pair": {},
    "sppo_hard": {}, "apo_zero": {}, "apo_down": {}, "discopop": {}, "sigmoid_norm": {},
}.items():
    keys = {"rl": "dpo", "rl_beta": 0.2, "dpo_loss_type": loss} | {f"dpo_{key}": value for key, value in told.items()}
    CASES[f"tiny-qwen3-dpo-{loss}"] = ("tiny-qwen3", "dpo", {"beta": 0.2, "loss_type": [loss]} | told, keys, "texts")


# These two trainers begin every text with BOS, even if the tokenizer does not.
CASES |= {
    "tiny-qwen3-rpo": (
        "tiny-qwen3", "dpo", {"beta": 0.2, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"rl": "dpo", "rl_beta": 0.2, "rpo_alpha": 0.5}, "texts"),
    "tiny-llama3-cpo": ("tiny-llama3", "cpo", {"beta": 0.1}, {"rl": "cpo"}, "texts"),
    "tiny-llama3-simpo-alone": (
        "tiny-llama3", "cpo", {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0},
        {"rl": "simpo", "rl_beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 1.0}, "texts"),
    "tiny-llama3-simpo": (
        "tiny-llama3", "cpo", {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.3},
        {"rl": "simpo", "rl_beta": 2.0, "cpo_alpha": 0.3}, "texts"),
    "tiny-llama3-orpo": ("tiny-llama3", "orpo", {"beta": 0.3}, {"rl": "orpo", "orpo_alpha": 0.3}, "texts"),
    "tiny-llama3-kto": ("tiny-llama3", "kto", {"beta": 0.3}, {"rl": "kto", "rl_beta": 0.3}, "labelled"),
    "tiny-llama3-kto-whole": (
        "tiny-llama3", "kto", {"beta": 0.3, "desirable_weight": 0.4, "undesirable_weight": 1.5},
        {"rl": "kto", "rl_beta": 0.3, "kto_desirable_weight": 0.4, "kto_undesirable_weight": 1.5}, "labelled"),
    "tiny-qwen3-kto-messages": ("tiny-qwen3", "kto", {"beta": 0.2}, {"rl": "kto", "rl_beta": 0.2}, "labelled messages"),
    "tiny-llama3-orpo-whole": ("tiny-llama3", "orpo", {"beta": 0.1}, {"rl": "orpo"}, "texts"),
}


# Models of scores, whose head is new.
CENTERED = ({"center_rewards_coefficient": 0.05}, {"reward_model": True, "center_rewards_coefficient": 0.05})
CASES |= {
    "tiny-llama3-reward-whole": ("tiny-llama3", "reward", {}, {"reward_model": True}, "texts"),
    "tiny-llama3-reward": ("tiny-llama3", "reward", *CENTERED, "texts"),
    "tiny-qwen3-reward-whole": ("tiny-qwen3", "reward", *CENTERED, "messages"),
    "tiny-qwen3-reward": ("tiny-qwen3", "reward", {}, {"reward_model": True}, "implicit"),
    "tiny-gpt2-reward": ("tiny-gpt2", "reward", {}, {"reward_model": True}, "texts"),
}


def records(form):
    """The pairs in a form, as both trainers read them."""
    pairs = [json.loads(line) for line in (HERE / "pairs.jsonl").read_text().splitlines()]
    if form == "texts":
        return pairs
    labelled = lambda i, pair: ("chosen", True) if i % 3 else ("rejected", False)
    if form == "labelled":
        answers = [(pair, *labelled(i, pair)) for i, pair in enumerate(pairs)]
        return [{"prompt": pair["prompt"], "completion": pair[key], "label": label} for pair, key, label in answers]
    asked = lambda pair: [{"role": "user", "content": pair["prompt"]}]
    answer = lambda text: [{"role": "assistant", "content": text.strip()}]
    if form == "labelled messages":
        answers = [(pair, *labelled(i, pair)) for i, pair in enumerate(pairs)]
        return [{"prompt": asked(pair), "completion": answer(pair[key]), "label": label} for pair, key, label in answers]
    if form == "messages":
        return [{"prompt": asked(p), "chosen": answer(p["chosen"]), "rejected": answer(p["rejected"])} for p in pairs]
    return [{key: asked(p) + answer(p[key]) for key in ("chosen", "rejected")} for p in pairs]


def trainer_of(kind, folder, told, model, tokenizer, data):
    arguments = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "per_device_train_batch_size": RUN["batch"], "max_steps": RUN["steps"], "learning_rate": RUN["lr"],
        "lr_scheduler_type": "constant", "adam_beta1": RUN["betas"][0], "adam_beta2": RUN["betas"][1],
        "adam_epsilon": RUN["eps"], "weight_decay": RUN["wd"], "max_grad_norm": RUN["clip_norm"], "bf16": False,
        "gradient_checkpointing": False, "max_length": None, "disable_dropout": True,
    } | told
    config, trainer = TRAINERS[kind]
    if kind == "reward":
        arguments |= {"max_length": 1024}
    elif kind in ("cpo", "orpo"):
        arguments |= {"max_length": 1024, "remove_unused_columns": False}
    class Sequential(trainer):
        """Takes the samples in their order, and keeps the losses, which the log rounds."""

        losses = []

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            self.losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found
    Sequential.losses = []
    return Sequential(model=model, args=config(**arguments), train_dataset=data, processing_class=tokenizer)


def make(name, out):
    model_name, kind, told, keys, form = CASES[name]
    adapter = {} if name.endswith("-whole") else GPT2_ADAPTER if "gpt2" in model_name else ADAPTER
    folder = out / "models" / model_name
    like_file = {"dtype": torch.float32, "attn_implementation": "eager"}
    if kind == "reward":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **like_file)
        with torch.no_grad():
            model.score.weight.copy_(drawn_head(model.config.hidden_size, model.config.initializer_range))
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **like_file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    rows = records(form)
    with tempfile.TemporaryDirectory() as temporary:
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        model = adapted(model, adapter, task) if adapter else model
        trainer = trainer_of(kind, temporary, told, model, tokenizer, datasets.Dataset.from_list(rows))
        trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert len(logs) == len(trainer.losses) == RUN["steps"], f"{len(logs)} steps"
    kept = ("rewards/", "logps/", "nll_loss", "log_odds", "kl", "accuracy", "margin", "mean_reward")
    # A likelihood without a weight is not computed.
    is_told = lambda log, key: key.startswith(kept) and (key, log[key]) != ("nll_loss", 0.0)
    curve = [
        {"loss": loss, "grad_norm": log["grad_norm"]} | {key: log[key] for key in sorted(log) if is_told(log, key)}
        for loss, log in zip(trainer.losses, logs)]
    numbers = {
        "model": model_name,
        "made_with": {package.__name__: package.__version__ for package in (torch, transformers, peft, trl)},
        "hyperparameters": RUN, "keys": keys, "adapter": adapter, "template": TEMPLATE, "records": rows, "curve": curve,
    }
    (out / "numbers" / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"{name}: loss {curve[0]['loss']:.4f} -> {curve[-1]['loss']:.4f}, norms {[round(s['grad_norm'], 3) for s in curve]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for name in args.names or CASES:
        make(name, args.out)


if __name__ == "__main__":
    main()
