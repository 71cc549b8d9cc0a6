"""Runs Axolotl's example configurations through Phalanx, with models and data sets replaced by local ones.

usage: axolotl_examples.py EXAMPLES --models DIR [--phalanx BINARY] [--train] [--preferences] [--only PART] [--json FILE]

EXAMPLES is the folder `examples` of a checkout of axolotl-ai-cloud/axolotl. DIR holds a folder tiny-llama3, and perhaps
tiny-qwen2, tiny-qwen3, tiny-mistral and tiny-gpt2, which get a chat template if they have none. `base_model` becomes one of them;
`path` of each data set becomes a file of 400 samples in the format that its entry describes, and `data_files` and `name`, which are
places too, are removed. Nothing else is changed. Each file is then given to `phalanx estimate` and, with --train, to `phalanx train
--max_steps 1`.

Counted are current fine-tunes on text: not files in `archived`, on images or sound, on preferences or rewards, or of other kinds of
model. With --preferences, those on preferences and rewards are counted instead; stand-ins for Llama 3 then have its token <|eot_id|>.
Exits with 1 if a file fails without a sentence (exit code other than 2), and with 77 without PyYAML.
"""
import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import yaml
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

MODELS = [("qwen3", "tiny-qwen3"), ("qwen", "tiny-qwen2"), ("mistral", "tiny-mistral"), ("gpt2", "tiny-gpt2")]
NOT_TEXT = re.compile(r"vision|-vl|_vl|llava|pixtral|smolvlm|voxtral|internvl|multimodal|mm-|image|audio|cloud|ebft|diffusion")
NOT_TEXT_KEYS = ["rl", "reward_model", "process_reward_model", "ebft", "diffusion", "num_labels", "image_size"]
PREFERENCE_KEYS = ["rl", "reward_model", "process_reward_model"]
N_SAMPLES = 400
LLAMA_3_TOKENS = ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def asks(value):
    return value not in (None, False, 0, "", [], {}, "none")


def is_counted(path, job, preferences):
    """Whether the file is a current fine-tune on text, or one on preferences."""
    if "archived" in path.parts or "base_model" not in job:
        return False
    if preferences:
        return any(asks(job.get(key)) for key in PREFERENCE_KEYS)
    if NOT_TEXT.search(str(path).lower()) or any(asks(job.get(key)) for key in NOT_TEXT_KEYS):
        return False
    sets = [e for e in job.get("datasets") or [] if isinstance(e, dict)]
    return not any("vsft" in str(e.get("path")) or "vision" in str(e.get("path")) for e in sets)


def sample(entry, n):
    """A row that has the fields which the entry of `datasets` reads."""
    mapping = entry.get("message_property_mappings") or {}
    role = mapping.get("role") or entry.get("message_field_role") or "role"
    content = mapping.get("content") or entry.get("message_field_content") or "content"
    names = {"from": ("human", "gpt")}.get(role, ("user", "assistant"))
    turn = lambda name, text: {role: name, content: text}
    messages = [turn(names[0], f"What is {n} plus {n}?"), turn(names[1], f"It is {2 * n}.")]
    text = f"Number {n}: {n} plus {n} is {2 * n}. " * 4
    return {
        entry.get("field_messages") or "messages": messages,
        "instruction": f"Add {n} and {n}.", "input": "", "output": str(2 * n), "question": f"{n} + {n}", "answer": str(2 * n),
        "category": "sums", entry.get("field") or entry.get("text_column") or "text": text,
    }


def preferences(job, entry, n):
    """A row of two answers, or of a labelled one, that has the fields which the entry of `datasets` reads."""
    mapping, kind = entry.get("message_property_mappings") or {}, str(entry.get("type"))
    role = mapping.get("role") or entry.get("message_field_role") or "role"
    content = mapping.get("content") or entry.get("message_field_content") or "content"
    roles = entry.get("roles") or {}
    user, assistant = ((roles.get(name) or [name])[0] for name in ("user", "assistant"))
    turn = lambda name, text: {role: name, content: text}
    question, good, bad = f"What is {n} plus {n}?", f"It is {2 * n}.", f"I do not know {n}."
    messages, chosen, rejected = (entry.get(f"field_{name}") or name for name in ("messages", "chosen", "rejected"))
    if job.get("rl") == "kto":
        return {"prompt": question, "completion": good if n % 2 else bad, "label": bool(n % 2)}
    if kind == "chat_template.default":
        return {messages: [turn(user, question)], chosen: turn(assistant, good), rejected: turn(assistant, bad)}
    if "ultra" in kind or kind == "chat_template.argilla":
        answers = {chosen: [turn(user, question), turn(assistant, good)], rejected: [turn(user, question), turn(assistant, bad)]}
        return {"prompt": question, **answers}
    if kind.startswith("bradley_terry"):
        return {"system": "", "input": question, "chosen": good, "rejected": bad}
    return {"prompt": question, "question": question, "chosen": good, "rejected": bad}


def localised(job, models, folder):
    """The job with local models and data."""
    name = str(job["base_model"]).lower()
    local = next((local for part, local in MODELS if part in name and (models / local).is_dir()), "tiny-llama3")
    job = {**job, "base_model": str(models / local)}
    if asks(job.get("tokenizer_config")):
        job["tokenizer_config"] = job["base_model"]
    for key in ("datasets", "pretraining_dataset", "test_datasets"):
        entries = job.get(key)
        if not isinstance(entries, list):
            continue
        changed = []
        for i, entry in enumerate(entries):
            file = folder / f"{key}{i}.jsonl"
            is_pair = any(asks(job.get(key)) for key in PREFERENCE_KEYS)
            row = (lambda n, entry=entry: preferences(job, entry, n)) if is_pair else (lambda n, entry=entry: sample(entry, n))
            file.write_text("".join(json.dumps(row(n)) + "\n" for n in range(N_SAMPLES)))
            places = ("data_files", "name")
            changed.append({**{k: v for k, v in entry.items() if k not in places}, "path": str(file)})
        job[key] = changed
    return {**job, "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared")}


def long_models(models, folder):
    """Copies of the models for sequences of any length, with a chat template, which the models of chat examples have."""
    for model in (m for m in models.iterdir() if (m / "config.json").is_file()):
        copy = folder / model.name
        copy.mkdir(parents=True)
        for file in model.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        config = json.loads((copy / "config.json").read_text())
        # The table of positions of GPT-2 is part of its weights.
        if "max_position_embeddings" in config and config.get("model_type") != "gpt2":
            config["max_position_embeddings"] = 1 << 20
            (copy / "config.json").write_text(json.dumps(config))
        file = copy / "tokenizer_config.json"
        tokenizer = json.loads(file.read_text()) if file.is_file() else {}
        if "chat_template" not in tokenizer and not (copy / "chat_template.jinja").is_file():
            file.write_text(json.dumps({**tokenizer, "chat_template": CHATML}))
    return folder


def with_tokens(model, texts):
    """Gives these tokens the ids of merged ones that no other merge needs."""
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    bpe = tokenizer["model"]
    halves = lambda merge: merge if isinstance(merge, list) else merge.split(" ")
    for text in texts:
        needed = {half for merge in bpe["merges"] for half in halves(merge)}
        made = ["".join(halves(merge)) for merge in bpe["merges"]]
        free = next(token for token in reversed(made) if token not in needed)
        bpe["merges"] = [merge for merge, token in zip(bpe["merges"], made) if token != free]
        token_id = bpe["vocab"].pop(free)
        flags = {flag: False for flag in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer["added_tokens"].append({"id": token_id, "content": text, "special": True, **flags})
        bpe["vocab"][text] = token_id
    file.write_text(json.dumps(tokenizer))


def run(command, folder):
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        return 124, "error: no end within 300 s"


def obstacles(stderr):
    """The sentences of an error, without what differs from file to file."""
    text = stderr.partition("error: ")[2]
    lines = text.splitlines()
    lines = [line.strip() for line in lines[1:] if line.startswith("  ")] if "errors:" in text else lines[:1]
    return [re.sub(r"\(line \d+\)|/tmp\S+", "", line).replace("  ", " ") for line in lines]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", type=pathlib.Path)
    parser.add_argument("--models", type=pathlib.Path, required=True)
    parser.add_argument("--phalanx", default="target/release/phalanx")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--preferences", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    binary = str(pathlib.Path(args.phalanx).resolve())
    files, results = [], []
    for path in sorted(args.examples.glob("**/*.y*ml")):
        job = yaml.safe_load(path.read_text())
        is_wanted = isinstance(job, dict) and is_counted(path.relative_to(args.examples), job, args.preferences)
        if is_wanted and args.only in str(path):
            files.append((path, job))
    kept = tempfile.TemporaryDirectory()
    models = long_models(args.models.resolve(), pathlib.Path(kept.name) / "models")
    if args.preferences:
        with_tokens(models / "tiny-llama3", LLAMA_3_TOKENS)
    for path, job in files:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            config = folder / "job.yaml"
            config.write_text(yaml.safe_dump(localised(job, models, folder), sort_keys=False))
            code, stderr = run([binary, "estimate", str(config)], folder)
            trained = None
            if code == 0 and args.train:
                trained, stderr = run([binary, "train", str(config), "--max_steps", "1"], folder)
            name = str(path.relative_to(args.examples))
            results.append({"file": name, "estimate": code, "train": trained, "obstacles": obstacles(stderr)})
    accepted = [r for r in results if r["estimate"] == 0]
    kind = "fine-tunes on preferences and rewards" if args.preferences else "current text fine-tunes"
    print(f"{len(results)} {kind}; accepted by estimate: {len(accepted)}", end="")
    print(f"; trained a step: {sum(r['train'] == 0 for r in accepted)}" if args.train else "")
    files_of = collections.Counter(o for r in results for o in set(r["obstacles"]))
    only = collections.Counter(r["obstacles"][0] for r in results if len(r["obstacles"]) == 1)
    for obstacle, n in files_of.most_common():
        print(f"{n:4} files, {only[obstacle]:3} by it alone: {obstacle}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    unclear = [r["file"] for r in results if r["estimate"] not in (0, 2) or r["train"] not in (None, 0, 2)]
    unclear += [r["file"] for r in results if r["estimate"] == 2 and not r["obstacles"]]
    if unclear:
        print("without a sentence:", *unclear)
    sys.exit(bool(unclear))


main()
