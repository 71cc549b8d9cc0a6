"""One PyTorch process timing the training step of the benchmark model; prints one JSON line.

usage: torch_step.py f32|bf16 STEPS
The model: Llama-shaped, d_model 512, 8 heads, 6 layers, SwiGLU 1408, vocabulary 4096, batch 4 x 256, fused AdamW, 2 threads.
"""
import json
import resource
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

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


def main():
    mode, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(2)
    torch.manual_seed(0)
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    model = Model()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(0, V, (B, S))
    labels = torch.randint(0, V, (B, S))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
            loss = F.cross_entropy(model(ids).view(-1, V).float(), labels.view(-1))
        loss.backward()
        opt.step()
        times.append((time.perf_counter() - start) * 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"name": f"torch {torch.__version__} {mode}", "median_ms": statistics.median(times[2:]),
                      "min_ms": min(times[2:]), "peak_rss_mib": peak, "import_rss_mib": imported,
                      "loss": loss.item()}))


if __name__ == "__main__":
    main()
