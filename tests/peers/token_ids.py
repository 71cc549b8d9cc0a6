#!/usr/bin/env python3
"""Compares token ids with those of transformers' AutoTokenizer, for folders of every kind that a supported model can have.

    cargo build --release -p phalanx --bin phalanx
    python3 tests/peers/token_ids.py target/release/phalanx [--exports [--family FAMILY]] [--only WORD]

Small vocabularies (byte-level, pieces with bytes, Unigram, WordPiece) are combined with the classes and families that change how
transformers reads them, and with settings and side files; each folder tokenizes texts with blanks, newlines, special tokens, odd
Unicode and long runs. Ids of Phalanx are those in its token cache. A folder that transformers refuses is left out, and one whose
rules lose text in transformers must be named in a note.

With --exports, a run of one step exports a model with each tokenizer; transformers and Phalanx must read the same ids from the export.
The model is of the folder's family, or of the one given, as in a run that takes a tokenizer from elsewhere.
Exits with 0 if all ids are equal; with 77 without transformers.
"""

import argparse
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
try:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

CORPUS = ["Once upon a time there was a little girl named Lily. She liked to play outside, in the park.\n\n",
          "def f(x):\n    return x + 1  # one, two\n", "It's 1234 o'clock; we'll see 'them' at 5.\n", "Grüße, 世界 — naïve café\n"] * 20
TEXTS = ["", "a", " a", "  a", "a b", "a  b", "a ", " ", "\n", "\n\na\n", "a\n\n  b\t c", "It's 1234 we'LL 'see'", "<s>a", "<s> a", "a<s>b",
         "a <s> b", "a</s> b</s>c", "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", "x<|im_end|> y", "<|endoftext|>a",
         "e\u0301 é ﬁ", "世界 🌍🏽 \u200d", "\u00a0\u3000 x", "▁a ▁▁b", "<unk>a<pad>", "word[TOK]word [TOK] x [TOK]", "a  [TOK]  b", "[tok] [Tok]",
         "l" * 300, " " * 300 + "a", "a" + "\n" * 70 + "b", "ab" * 150, "\x00\x7f", "[CLS] a [SEP]", "The QUICK brown Fox"]
SPECIALS = ["<unk>", "<s>", "</s>"]
ROLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def bos_first(tokenizer, bos="<s>"):
    id_ = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, id_)])


def byte_level(alphabet=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [])
    tokenizer.train_from_iterator(CORPUS, trainer)
    bos_first(tokenizer)
    return tokenizer


def pieces(prepend=True):
    """As SentencePiece has them: a blank is U+2581, unknown characters are bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False, special_tokens=["<unk>"]))
    learned = json.loads(trained.to_str())["model"]
    vocab = {token: i for i, token in enumerate(SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)])}
    for token in learned["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prepend else steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    bos_first(tokenizer)
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False))
    bos_first(tokenizer)
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIALS, show_progress=False))
    return tokenizer


def llama3():
    """Byte-level with the rule of Llama 3, added tokens behind the vocabulary, and no merges for whole words."""
    tokenizer = byte_level()
    from tokenizers import Regex
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    return tokenizer


VOCABULARIES = {"bytes": byte_level, "pieces": pieces, "pieces without prefix": lambda: pieces(False), "unigram": unigram,
                "wordpiece": word_piece, "llama3": llama3}
FAMILIES = [None, "llama", "mistral", "gpt2", "qwen2", "qwen3", "phi3", "granite", "olmo2"]
CLASSES = [None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer",
           "GemmaTokenizerFast", "GPT2Tokenizer", "GPTNeoXTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "CohereTokenizerFast",
           "Qwen3_5Tokenizer", "NoSuchTokenizer"]
token = lambda text, **flags: {"content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
                               "single_word": False, **flags}
FLAGS = [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {"normalized": True},
         {"special": False}, {"special": False, "normalized": True}, {"special": False, "normalized": True, "lstrip": True}]


def folders():
    """Name, vocabulary, keys of tokenizer_config.json, other files, and changes of tokenizer.json."""
    for vocabulary in VOCABULARIES:
        for family in FAMILIES:
            for class_ in CLASSES:
                config = {**ROLES, **({"tokenizer_class": class_} if class_ else {})}
                yield f"{vocabulary}, {family}, {class_}", vocabulary, config, family, {}, None
    for vocabulary in ["pieces", "bytes"]:
        for class_ in ["LlamaTokenizer", "CodeLlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"]:
            base = {**ROLES, "tokenizer_class": class_}
            case = lambda name, keys=None, files=None, change=None: (
                f"{vocabulary}, {class_}, {name}", vocabulary, {**base, **(keys or {})}, "llama", files or {}, change)
            for prefix in [True, False, None]:
                for legacy in [True, False, None]:
                    yield case(f"prefix {prefix} legacy {legacy}", {"add_prefix_space": prefix, "legacy": legacy})
            yield case("no keys at all", {key: None for key in ROLES})
            yield f"{vocabulary}, {class_}, only class", vocabulary, {"tokenizer_class": class_}, "llama", {}, None
            for bos in [True, False]:
                for eos in [True, False]:
                    yield case(f"bos {bos} eos {eos}", {"add_bos_token": bos, "add_eos_token": eos})
            yield case("splits specials", {"split_special_tokens": True})
            for flags in FLAGS:
                yield case(f"decoder {flags}", {"added_tokens_decoder": {
                    "0": token("<unk>"), "1": token("<s>"), "2": token("</s>"), "900": token("[TOK]", **flags)}})
                yield case(f"own token {flags}", change=lambda t, flags=flags: t["added_tokens"].append(
                    {"id": 1000 + len(t["added_tokens"]), **token("[TOK]", **flags)}))
                yield case(f"role {flags}", {"pad_token": {"__type": "AddedToken", **token("[TOK]", **flags)}})
            chat = {"900": token("<|im_start|>"), "901": token("<|im_end|>")}
            yield case("decoder without the own tokens", {"added_tokens_decoder": chat})
            yield case("decoder beside a map", {"added_tokens_decoder": chat, "eos_token": "<|im_end|>"},
                       {"special_tokens_map.json": {"eos_token": "[TOK]", "additional_special_tokens": ["<pad>"]}})
            yield case("additional", {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
            yield case("extra and additional", {"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": ["<|im_end|>"]})
            yield case("extra by name", {"extra_special_tokens": {"turn_token": "<|im_start|>", "stop_token": "<|im_end|>"}})
            yield case("own role", {"turn_token": "<|im_start|>"})
            yield case("map", files={"special_tokens_map.json": {
                "eos_token": token("<|im_end|>"), "turn_token": "<|im_start|>", "additional_special_tokens": ["[TOK]"]}})
            yield case("map and additional", {"additional_special_tokens": ["<|im_start|>"]},
                       {"special_tokens_map.json": {"additional_special_tokens": ["<|im_end|>"]}})
            yield case("map and extra", {"extra_special_tokens": ["<|im_start|>"]},
                       {"special_tokens_map.json": {"extra_special_tokens": ["<|im_end|>", "<|im_start|>"]}})
            yield case("added", files={"added_tokens.json": {"<|im_end|>": 901, "<|im_start|>": 900, "<s>": 1}})
            yield case("added, named", {"eos_token": "<|im_end|>"}, {"added_tokens.json": {"<|im_end|>": 901, "<|im_start|>": 900}})
            yield case("added in the place of another", files={"added_tokens.json": {"<|im_end|>": 1, "<s>": 905, "[TOK]": 700}})
            yield case("truncation and padding", change=lambda t: t.update(
                truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
                padding={"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                         "pad_token": "<unk>"}))
            yield case("no post-processor", change=lambda t: t.update(post_processor=None))
            yield case("no bytes", change=lambda t: t["model"].update(byte_fallback=False))
            yield case("whole words first", change=lambda t: t["model"].update(ignore_merges=True))
            yield case("auto_map", {"auto_map": {"AutoTokenizer": [None, "tokenization_x.X"]}})
            yield case("class of the model", {"tokenizer_class": None}, {"config.json": {"tokenizer_class": class_}})


def write(folder, vocabulary, config, family, files, change):
    folder.mkdir()
    tokenizer = json.loads(vocabulary)
    if change:
        change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    files = {name: dict(content) for name, content in files.items()}
    if family:
        files["config.json"] = {"model_type": family, **files.get("config.json", {})}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def ids_of_transformers(folder):
    """For each text what AutoTokenizer gives, with what it puts in front."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in TEXTS]
    last = [] if eos is None else [eos]
    return [one + last if text else one for one, text in zip(ids, TEXTS)], tokenizer.bos_token_id


def phalanx(work, *args):
    run = subprocess.run([binary, *args], cwd=work, capture_output=True, text=True,
                         env={**os.environ, "NO_COLOR": "1", "RAYON_NUM_THREADS": "1", "XDG_CACHE_HOME": str(work / "xdg")})
    # `train` prints notes to standard output, `prepare` to standard error.
    return run.returncode, run.stdout + run.stderr


MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 4096}
MODELS = {"gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": 1024, "vocab_size": 4096},
          "qwen3": {**MODEL, "head_dim": 16}}
JOB = """model: {model}
tokenizer: {folder}
datasets: [{{path: texts.jsonl, type: completion}}]
sequence_len: 1024
min_sample_len: 1
micro_batch_size: 1
max_steps: 1
output_dir: {out}
"""


def ids_of_phalanx(work, folder, out, command, family):
    """Its token cache: a header of 128 bytes with the numbers of tokens and documents, the tokens, the ends of the documents."""
    shutil.rmtree(work / out, ignore_errors=True)
    model = {"model_type": family, **MODELS.get(family, MODEL)}
    (work / "job.yaml").write_text(JOB.format(model=json.dumps(model), folder=folder, out=out))
    code, printed = phalanx(work, command, "job.yaml")
    if code:
        return None, printed
    [cache] = [path for path in (work / out).rglob("*.tokens")]
    content = cache.read_bytes()
    n_tokens, n_documents = struct.unpack_from("<QQ", content, 16)
    tokens = [id_ & 0x7FFFFFFF for id_ in struct.unpack_from(f"<{n_tokens}I", content, 128)]
    ends = struct.iter_unpack("<QQ", content[len(content) - 16 * n_documents:])
    start, documents = 0, {}
    for end, line in ends:
        documents[line] = tokens[start:end]
        start = end
    return [documents.get(line + 1, []) for line in range(len(TEXTS))], printed


def differences(ours, theirs):
    return [(text, one, other) for text, one, other in zip(TEXTS, ours, theirs) if one != other and text]


def differences_of_export(work, ours, family):
    again, printed = ids_of_phalanx(work, work / "out/model", "again", "prepare", family)
    if again is None:
        return [("the export is refused here", "", printed.strip()[-300:])]
    found = differences(ours, again)
    if found:
        return [(f"export read here: {text}", *ids) for text, *ids in found]
    if "lose characters" in printed:  # The note says that transformers has other ids.
        return []
    try:
        return differences(ours, ids_of_transformers(work / "out/model")[0])
    except Exception as error:
        return [("the export is refused by transformers", "", repr(error)[:300])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--exports", action="store_true")
    parser.add_argument("--family", help="of the models that are exported, instead of the tokenizer's")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1, help="of the folders, one in so many")
    args = parser.parse_args()
    binary = str(pathlib.Path(args.binary).resolve())
    vocabularies = {name: build().to_str() for name, build in VOCABULARIES.items()}
    failed, refused, lossy, n_equal, n_exports = [], 0, 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="tokenizers-") as name:
        work = pathlib.Path(name)
        (work / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        for i, (name, vocabulary, *rest) in enumerate(folders()):
            if args.only not in name or i % args.every:
                continue
            folder = work / f"tokenizer-{i}"
            write(folder, vocabularies[vocabulary], *rest)
            try:
                theirs, _ = ids_of_transformers(folder)
            except Exception as error:  # Whatever it raises, it does not load the folder.
                refused += 1
                continue
            family = args.family or rest[1] or "llama"
            ours, printed = ids_of_phalanx(work, folder, "out", "train" if args.exports else "prepare", family)
            found = [("refused", printed.strip()[-300:], "")] if ours is None else differences(ours, theirs)
            if found and "lose characters" in printed:
                lossy += 1
                found = []
            else:
                n_equal += not found
            if not found and args.exports:
                found = differences_of_export(work, ours, family)
                n_exports += not found
            if found:
                failed.append(name)
                text, one, other = found[0]
                print(f"{name}: {len(found)} texts differ, the first is {text[:40]!r}:\n  here         {one}\n  there        {other}")
            shutil.rmtree(folder)
    print(f"{n_equal} folders have equal ids, {len(failed)} differ, {refused} are refused by transformers, "
          f"{lossy} lose text there and have a note" + (f"; {n_exports} exports have equal ids" if args.exports else ""))
    sys.exit(1 if failed else 0)
