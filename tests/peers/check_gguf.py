"""Compares a GGUF file with the model directory that it was made of.

usage: check_gguf.py MODEL_DIR FILE.gguf

Reads the file with the package `gguf` and compares every tensor with that of the directory.
"""

import sys

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoModelForCausalLM

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    _, _, block, part = module.split(".", 3)
    return f"blk.{block}.{NAMES[part]}.{kind}"


def interleaved(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    heads = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    directory, path = sys.argv[1:3]
    reader = GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    found = {tensor.name: tensor for tensor in reader.tensors}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, n_compared, worst = model.config, 0, 0.0
    for name, weight in model.state_dict().items():
        target = gguf_name(name)
        if target == "output.weight" and target not in found:
            assert config.tie_word_embeddings, "the output layer is missing"
            continue
        if architecture == "llama" and ".attn_q." in target:
            weight = interleaved(weight, config.num_attention_heads)
        if architecture == "llama" and ".attn_k." in target:
            weight = interleaved(weight, config.num_key_value_heads)
        tensor = found.pop(target)
        values = dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        scale = float(weight.abs().max()) or 1.0
        distance = float(np.abs(values - weight.numpy()).max()) / scale
        bounds = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 5e-3, "Q6_K": 0.03, "Q5_K": 0.06, "Q4_K": 0.12}
        bound = bounds[tensor.tensor_type.name]
        assert distance <= bound, f"{target} is {distance} off"
        n_compared, worst = n_compared + 1, max(worst, distance)
    assert set(found) <= {"rope_freqs.weight"}, f"unexpected tensors: {sorted(found)}"
    print(f"{n_compared} tensors of architecture {architecture}; the largest distance is {worst:.1e} of a tensor's largest value")


if __name__ == "__main__":
    main()
