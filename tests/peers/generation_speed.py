"""Times a token of greedy generation beside transformers, on processors.

usage: generation_speed.py PHALANX TOKENIZER_DIR [--dtype float32] [--rounds 5] [--threads 2] [--layers 12] [--width 768]
                           [--vocabulary 32000]

A Llama of random weights is written with the tokenizer of TOKENIZER_DIR (a model directory), whose vocabulary gets more words. Both sides continue one prompt
with a cache of keys and values, by 32 and by 32 + 128 tokens; the difference of the times, divided by 128, is the time of a token, so
neither loading nor the prompt counts. The rounds are interleaved. Prints medians and each round, and whether the texts agree: equal
texts come from equal tokens. Exits with 1 if they do not.

With `--dtype bfloat16` the weights are stored in bf16. transformers then computes in bf16, where its default loads a model, and, as a
third side, in f32; the text must agree with that of the third, because Phalanx computes in f32.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
SHORT, MORE = 32, 128


def write_model(folder, args):
    torch.manual_seed(1)
    source, folder = pathlib.Path(args.tokenizer), pathlib.Path(folder)
    shutil.copy(source / "tokenizer_config.json", folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    # Words that no text is split into, so that every id that the model may generate has a text.
    vocabulary.update({f"w{id}": id for id in range(args.vocabulary) if id not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        max_position_embeddings=1024,
        # Large enough weights that the most likely token leads the next by more than rounding does.
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(getattr(torch, args.dtype)).save_pretrained(folder)


def of_transformers(model, tokenizer, n):
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    start = time.perf_counter()
    with torch.inference_mode():
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, min_new_tokens=n)
    return time.perf_counter() - start, tokenizer.decode(ids[0], skip_special_tokens=True)


def of_phalanx(args, folder, n):
    command = [args.phalanx, "generate", folder, "--prompt", PROMPT, "--max-new-tokens", str(n)]
    command += ["--temperature", "0", "--ignore-eos", "--threads", str(args.threads)]
    start = time.perf_counter()
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return time.perf_counter() - start, text.removesuffix("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    parser.add_argument("tokenizer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for key, default in [("rounds", 5), ("threads", 2), ("layers", 12), ("width", 768), ("vocabulary", 32000)]:
        parser.add_argument(f"--{key}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sides = {}
        for dtype in dict.fromkeys([args.dtype, "float32"]):
            model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            sides[f"transformers in {dtype}"] = lambda n, model=model: of_transformers(model, tokenizer, n)
        sides["phalanx"] = lambda n: of_phalanx(args, folder, n)
        times, texts = {side: [] for side in sides}, {}
        for _ in range(args.rounds + 1):
            for side, generate in sides.items():
                short, _ = generate(SHORT)
                long, texts[side] = generate(SHORT + MORE)
                times[side].append((long - short) / MORE * 1e3)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"Llama of {size:.0f} M parameters, stored in {args.dtype}, {args.threads} threads, {args.rounds} rounds (a first one is not counted)")
        anchor = statistics.median(times[f"transformers in {args.dtype}"][1:])
        for side, all_rounds in times.items():
            median = statistics.median(all_rounds[1:])
            rounds = " ".join(f"{t:.2f}" for t in all_rounds[1:])
            print(f"| {side} | {median:.2f} ms a token | {rounds} | {median / anchor:.2f} |")
        same = texts["phalanx"] == texts["transformers in float32"]
        print("the texts agree" if same else f"the texts differ:\n{texts}")
        raise SystemExit(not same)


if __name__ == "__main__":
    main()
