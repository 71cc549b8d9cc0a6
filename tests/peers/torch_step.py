"""Times the training step of the benchmark model in one PyTorch process; prints one JSON line.

usage: torch_step.py eager|compile f32|bf16 STEPS START
The model: Llama-shaped, d_model 512, 8 heads, 6 layers, SwiGLU 1408, vocabulary 4096, batch 4 x 256, fused AdamW, 2 threads.
START is a file of `step_time --write`: the weights and the batch of Phalanx's step. `compile` is `torch.compile` of the model,
which needs a C++ compiler; the first step, which compiles, is not timed.
"""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import safetensors_file

D, H, LAYERS, FF, V, B, S = 512, 8, 6, 1408, 4096, 4, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.down = nn.Linear(FF, D, bias=False)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        q, k, v = (p(h).view(B, S, H, D // H).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, S, D))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(D, eps=1e-5), nn.Linear(D, V, bias=False)
        freq = 10000.0 ** (-torch.arange(0, D // H, 2) / (D // H))
        angle = torch.outer(torch.arange(S), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
NAMES_IN_BLOCK = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
NAMES_IN_BLOCK |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
NAMES_IN_BLOCK |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def name_in_file(name):
    """The name of a parameter in model directories of Llama."""
    words = name.split(".")
    if words[0] == "blocks":
        return f"model.layers.{words[1]}.{NAMES_IN_BLOCK[words[2]]}.weight"
    return f"{NAMES[words[0]]}.weight"


def start_from(model, tensors):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name_in_file(name)])


def optimizer(model):
    """AdamW without weight decay on the gains of norms, as in Phalanx."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays} for decays in (True, False)]
    return torch.optim.AdamW(groups, lr=3e-4, fused=True)


def main():
    how, mode, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(2)
    tensors = safetensors_file.read(sys.argv[4])
    model = Model()
    start_from(model, tensors)
    opt = optimizer(model)
    ids, labels = (tensors[name].long().view(B, S) for name in ("ids", "labels"))
    del tensors
    if how == "compile":
        model = torch.compile(model)
    times, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
            loss = F.cross_entropy(model(ids).view(-1, V).float(), labels.view(-1))
        loss.backward()
        opt.step()
        losses.append(loss.item())
        times.append((time.perf_counter() - start) * 1e3)
    print(json.dumps({"name": f"torch {torch.__version__} {how} {mode}", "median_ms": statistics.median(times[2:]),
                      "min_ms": min(times[2:]), "losses": losses}))


if __name__ == "__main__":
    main()
