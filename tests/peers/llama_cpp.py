"""Runs a GGUF file with llama.cpp, and the model directory that it was made of with transformers, and compares them.

usage: PYTHON_WITH_TRANSFORMERS tests/peers/llama_cpp.py MODEL_DIR FILE.gguf [TOLERANCE]

llama.cpp comes with the package `xllamacpp`, which has it compiled. Of several texts and each token of their greedy continuations, both must
have as many tokens, and log-probabilities of the 20 most likely next tokens that differ by less than TOLERANCE (default 0.02; files of
narrower numbers need more).
"""

import sys

import torch
import xllamacpp
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

TEXTS = ["Once upon a time there was a", "Lily and Tom went to the park.", "The sun", "\"Hello!\" said  the dog, 12 times.",
         "def add(a, b):\n    return", "Größe, naïve, 語."]
N_NEW, N_TOP = 24, 20


def main() -> None:
    directory, path = sys.argv[1:3]
    tolerance = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
    # As it stands in the file: classes of transformers rebuild some tokenizers from their vocabulary.
    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = 256, 1, 0, False, False
    params.cpuparams.n_threads = 2
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    worst, n_compared = 0.0, 0
    end = model.config.eos_token_id
    ends = set(end) if isinstance(end, list) else {end}
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        n_tokens = server.handle_completions({"prompt": text, "n_predict": 1})["usage"]["prompt_tokens"]
        assert n_tokens == len(ids), f"{text!r}: {n_tokens} tokens, {len(ids)} of the tokenizer"
        for _ in range(N_NEW):
            # Token by token: of a token that is a part of a character, llama.cpp tells nothing.
            answer = server.handle_completions({"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": N_TOP})
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            told = answer["choices"][0]["logprobs"] or {"content": [{"top_logprobs": []}]}
            for found in told["content"][0]["top_logprobs"]:
                distance = abs(found["logprob"] - float(expected[found["id"]]))
                worst, n_compared = max(worst, distance), n_compared + 1
                assert distance < tolerance, f"{text!r}: {found}, transformers {float(expected[found['id']])}"
            ids = [*ids, int(expected.argmax())]
            if ids[-1] in ends:
                break
    assert n_compared > 100, n_compared
    print(f"{n_compared} log-probabilities of {len(TEXTS)} texts; the largest difference is {worst:.1e}")


if __name__ == "__main__":
    main()
