"""Times a LoRA step of a Llama with 8 billion parameters on one GPU in transformers and PEFT; prints a line of JSON per variant.

usage: gpu_lora_step.py [--rows 1|2] [--shape JSON] [--quantised nf4] and the options of gpu_step.py
The model is Llama 3.1 8B with random weights in bf16 on rows of 4,096 tokens; adapters of rank 16 on all seven products, fused AdamW, a
clipped gradient norm, scaled_dot_product_attention. Head and cross-entropy are PyTorch's, over the model's last hidden state.
A variant is parts joined with "+":
  eager           as transformers runs it
  compiled        `layer.compile()` of each decoder layer, and head and loss compiled
  checkpoint      layers are computed again for their backward pass
  half            adapters in bf16, as PEFT with autocast_adapter_dtype=False; otherwise float32 below autocast, as PEFT has them
`--quantised nf4` keeps the frozen weights of the layers in 4 bits of bitsandbytes.
"""
import json

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from gpu_step import run

LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "seq_len": 4096,
}
PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARTS = {"eager", "compiled", "checkpoint", "half"}


def base_model(shape, device):
    """A model whose weights are drawn where they stay."""
    config = LlamaConfig(**shape, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are computed, not stored
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    for norm in (m for m in model.modules() if isinstance(m, LlamaRMSNorm)):
        nn.init.ones_(norm.weight)
    return model


def quantise(model, device):
    from bitsandbytes.nn import Linear4bit, Params4bit

    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in [(n, m) for n, m in parent.named_children() if isinstance(m, nn.Linear)]:
                small = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                small.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, name, small.to(device))


def head_loss(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), labels.flatten())


def prepare(variant, args):
    """The step of a variant, which returns its loss, and what a line tells of it."""
    parts, shape, device = set(variant.split("+")), dict(args.shape), args.device
    if unknown := parts - PARTS:
        raise ValueError(f"unknown parts: {', '.join(sorted(unknown))}")
    seq_len = shape.pop("seq_len")
    torch.manual_seed(0)
    base = base_model(shape, device)
    if args.quantised == "nf4":
        quantise(base, device)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=PRODUCTS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype="half" not in parts).train()
    loss_of = head_loss
    if "checkpoint" in parts:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if "compiled" in parts:
        loss_of = torch.compile(head_loss)
        for layer in base.model.layers:
            layer.compile()
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, weight_decay=0.0, fused=True)
    tokens = torch.randint(shape["vocab_size"], (args.rows, seq_len + 1), device=device)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled="half" not in parts):
            x = base.model(input_ids=ids).last_hidden_state
            loss = loss_of(x, base.lm_head.weight, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(adapters, 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    about = {"attention": variant, "rows": args.rows, "quantised": args.quantised, "trained": sum(p.numel() for p in adapters)}
    return step, args.rows * seq_len, about


def add_arguments(parser):
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--shape", type=json.loads, default=LLAMA_8B)
    parser.add_argument("--quantised", choices=["nf4"])


if __name__ == "__main__":
    run(__doc__, add_arguments, ["eager", "compiled"], prepare)
