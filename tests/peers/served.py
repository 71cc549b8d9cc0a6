"""Drives `phalanx serve` with the clients that people use, and compares with transformers.

usage: served.py PHALANX MODEL

- lm-eval-harness (`pip install lm_eval[api]`): its `local-completions` on the server, and its own `hf` model in float32, give the
  same log-likelihoods of continuations and of whole texts, the same greedy flags, and the same greedy text.
- The package `openai`, if it is installed: a chat, whole and streamed, has the greedy text of transformers.

Exits with 1 if anything differs.
"""

import pathlib
import re
import subprocess
import sys

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = pathlib.Path(__file__).parent.parent / "reference/text.txt"
N_NEW = 24


def letters(texts):
    """Texts without blanks: clients decode the first token of an answer with and without the blank before it."""
    return ["".join(text.split()) for text in texts]


def is_same(texts, others):
    """Bytes that are no text: a stream has shown those before them, where tokenizers show one replacement character for each byte of
    the run, so these texts are compared by their lengths."""
    pairs = list(zip(letters(texts), letters(others), strict=True))
    return all(a == b or ("\ufffd" in a and "\ufffd" in b and len(a) == len(b)) for a, b in pairs)


def instances(kind, all_arguments):
    return [Instance(kind, {}, arguments, i) for i, arguments in enumerate(all_arguments)]


def check_likelihoods(served, own, sentences):
    """Largest differences between the two, and whether flags and texts agree."""
    pairs = [(sentence[: len(sentence) // 2], sentence[len(sentence) // 2 :]) for sentence in sentences]
    # The greedy continuation of a text is one that both must call greedy.
    until = {"until": ["\n\n"], "max_gen_toks": N_NEW, "do_sample": False, "temperature": 0.0}
    generated = [model.generate_until(instances("generate_until", [(s, dict(until)) for s in sentences[:4]])) for model in (served, own)]
    pairs += [(sentence, text) for sentence, text in zip(sentences, generated[1]) if text.strip() and "\ufffd" not in text]
    found, wanted = (model.loglikelihood(instances("loglikelihood", pairs)) for model in (served, own))
    rolling = [model.loglikelihood_rolling(instances("loglikelihood_rolling", [(s,) for s in sentences])) for model in (served, own)]
    error = max(abs(a[0] - b[0]) / max(1, abs(b[0])) for a, b in zip(found, wanted))
    rolling_error = max(abs(a - b) / max(1, abs(b)) for a, b in zip(*rolling))
    flags = [[is_greedy for _, is_greedy in answers] for answers in (found, wanted)]
    print(f"lm_eval: {len(pairs)} continuations differ by at most {error:.1e}, {len(sentences)} texts by {rolling_error:.1e};")
    print(f"         greedy flags {'agree' if flags[0] == flags[1] else 'differ'} ({sum(flags[1])} are greedy), ", end="")
    is_same_text = is_same(*generated)
    print(f"generated texts {'agree' if is_same_text else f'differ: {generated}'}")
    return error < 1e-5 and rolling_error < 1e-5 and flags[0] == flags[1] and is_same_text


def check_chat(base_url, model):
    try:
        import openai
    except ImportError as missing:
        print(f"openai: skipped: {missing}")
        return True
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        print("openai: skipped: the model has no chat template")
        return True
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The tokens of the file itself: transformers may tokenize behind a special token otherwise than its file says.
    of_file = Tokenizer.from_file(str(pathlib.Path(model) / "tokenizer.json"))
    prompt = torch.tensor([of_file.encode(text, add_special_tokens=False).ids])
    mask = torch.ones_like(prompt)
    ids = network.generate(prompt, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False)[0, prompt.shape[1] :]
    wanted = tokenizer.decode(ids, skip_special_tokens=True)
    client = openai.OpenAI(base_url=base_url, api_key="unused")
    settings = {"model": client.models.list().data[0].id, "messages": messages, "max_tokens": N_NEW, "temperature": 0}
    whole = client.chat.completions.create(**settings).choices[0].message.content
    stream = client.chat.completions.create(**settings, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    is_same_text = is_same([whole], [wanted])
    print(f"openai: chat {'agrees' if is_same_text else f'differs: {whole!r}, {wanted!r}'}, its stream ", end="")
    print("agrees" if streamed == whole else f"differs: {streamed!r}")
    return is_same_text and whole == streamed


def main():
    phalanx, model = sys.argv[1:]
    server = subprocess.Popen([phalanx, "serve", model, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        base_url = re.search(r"http://\S+/v1", line).group()
        longest = int(re.search(r"at most (\d+) tokens", line).group(1))
        # Short enough for every model, so that neither cuts them.
        paragraphs = [text.strip() for text in TEXT.read_text().split("\n\n")]
        sentences = [text[:longest] for text in paragraphs if len(text) > 20][:12]
        served = LocalCompletionsAPI(
            model=model, base_url=f"{base_url}/completions", tokenizer=model, tokenizer_backend="huggingface", max_length=longest,
            batch_size=4, num_concurrent=1, add_bos_token=False,
        )
        own = HFLM(pretrained=model, dtype="float32", device="cpu", max_length=longest, batch_size=4, add_bos_token=False)
        is_equal = check_likelihoods(served, own, sentences)
        is_equal &= check_chat(base_url, model)
    finally:
        server.terminate()
        code = server.wait(timeout=30)
    print(f"the server ended with {code}")
    sys.exit(0 if is_equal and code == 0 else 1)


main()
