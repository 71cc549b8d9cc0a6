"""Times the training step of a Llama-shaped model in one PyTorch process; prints one JSON line.

usage: torch_step.py eager|compile|max-autotune f32|bf16 STEPS START
START is a file of `step_time --write`: the weights and the batch of Phalanx's step, whose shapes tell the model. Heads have width 64;
the optimizer is fused AdamW; 2 threads. `compile` is `torch.compile` of the model and its loss, and `max-autotune` the same with this
mode; both need a C++ compiler. The first steps, which compile, are not timed. A loss that is no number ends the program with 1.
"""
import dataclasses
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import safetensors_file

HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int
    ff: int
    layers: int
    vocabulary: int
    seq_len: int
    tied: bool = False

    @staticmethod
    def of(tensors, seq_len):
        """The shape of the model whose parameters these tensors are."""
        vocabulary, width = tensors["model.embed_tokens.weight"].shape
        layers = sum(name.endswith("q_proj.weight") for name in tensors)
        ff = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
        return Shape(width, ff, layers, vocabulary, seq_len, "lm_head.weight" not in tensors)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        d, ff = shape.width, shape.ff
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.down = nn.Linear(ff, d, bias=False)

    def forward(self, x, cos, sin):
        rows, seq_len, width = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(rows, seq_len, -1, HEAD_DIM).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(rows, seq_len, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        freq = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.outer(torch.arange(shape.seq_len), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids, labels):
        """The mean loss in nats. It is part of the model, so that `torch.compile` can fuse it with the head."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


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
    ids, labels = (tensors.pop(name).long() for name in ("ids", "labels"))
    shape = Shape.of(tensors, seq_len=ids.shape[1])
    model = Model(shape)
    start_from(model, tensors)
    opt = optimizer(model)
    del tensors
    if how != "eager":
        model = torch.compile(model, mode=None if how == "compile" else how)
    times, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
            loss = model(ids, labels)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        times.append((time.perf_counter() - start) * 1e3)
    if not all(map(math.isfinite, losses)):
        sys.exit(f"torch {how} {mode}: a loss is no number: {losses}")
    print(json.dumps({"name": f"torch {torch.__version__} {how} {mode}", "median_ms": statistics.median(times[2:]),
                      "min_ms": min(times[2:]), "losses": losses}))


if __name__ == "__main__":
    main()
