"""Runs a GGUF file with llama.cpp, and the model directory that it was made of with transformers, and compares them.

usage: PYTHON_WITH_TRANSFORMERS tests/peers/llama_cpp.py MODEL_DIR FILE.gguf [TOLERANCE]

llama.cpp comes with the package `xllamacpp`, which has it compiled. Of several texts, both must have the same tokens, the same greedy
continuation as long as the two most likely tokens differ by more than twice the tolerance, and log-probabilities of the most likely tokens
that differ by no more than TOLERANCE (default 0.01; a file with eight-bit integers needs more).
"""

import sys

import torch
import xllamacpp
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ["Once upon a time there was a", "Lily and Tom went to the park.", "The sun", "\"Hello!\" said  the dog, 12 times.",
         "def add(a, b):\n    return", "Größe, naïve, 語."]
N_NEW, N_TOP = 24, 20


def main() -> None:
    directory, path = sys.argv[1:3]
    tolerance = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = 256, 1, 0, False, False
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    worst, n_compared = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        request = {"n_predict": N_NEW, "temperature": 0, "n_probs": N_TOP, "ignore_eos": True, "cache_prompt": False}
        answers = [server.handle_completions({**request, "prompt": prompt}) for prompt in (text, ids)]
        assert answers[0]["tokens_evaluated"] == len(ids), f"{text!r}: {answers[0]['tokens_evaluated']} tokens, {len(ids)} of transformers"
        probabilities = [answer["completion_probabilities"] for answer in answers]
        assert probabilities[0] == probabilities[1], f"{text!r}: llama.cpp has other tokens than transformers"
        for step in probabilities[0]:
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            top = expected.topk(2).values
            decided = float(top[0] - top[1]) > 2 * tolerance
            # The ignored end of the text is no choice of llama.cpp's, and its share is given to the others.
            ends = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
            if int(expected.argmax()) in ends:
                break
            assert not decided or step["id"] == int(expected.argmax()), f"{text!r}: token {step['id']}, transformers has {int(expected.argmax())}"
            for found in step["top_logprobs"][:N_TOP]:
                # Rare tokens are rounded more.
                if found["id"] not in ends and found["logprob"] > -6:
                    distance = abs(found["logprob"] - float(expected[found["id"]]))
                    worst, n_compared = max(worst, distance), n_compared + 1
                    assert distance < tolerance, f"{text!r}: token {found['id']} has {found['logprob']}, transformers {float(expected[found['id']])}"
            ids = [*ids, step["id"]]
    assert n_compared > 100, n_compared
    print(f"{n_compared} log-probabilities of {len(TEXTS)} texts; the largest difference is {worst:.1e}")


if __name__ == "__main__":
    main()
