"""Times the training step of a Llama on one GPU in PyTorch, beside the same step of `phalanx-gpu`; prints a line of JSON per variant.

usage: gpu_step.py [--device cuda|cpu] [--steps N] [--shape JSON]     (--steps 0 only compiles)
`phalanx-gpu all --python PROGRAM` runs this file and gives the shape of its own step; the default is Llama 3.2 1B, 2 rows of 4096.
Each variant is `torch.compile` of the model with bf16 autocast over float32 weights, fused AdamW and a clipped gradient norm:
"default" lets PyTorch choose its attention, "cudnn" allows only that of cuDNN. A variant that cannot run prints its error.
"""
import argparse
import contextlib
import json
import os
import statistics
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn

LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8,
    "head_dim": 64, "rope_theta": 500000.0, "norm_eps": 1e-5, "n_rows": 2, "seq_len": 4096,
}


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        c, self.h, self.k, self.d = s["hidden_size"], s["n_heads"], s["n_kv_heads"], s["head_dim"]
        self.norm1, self.norm2 = nn.RMSNorm(c, eps=s["norm_eps"]), nn.RMSNorm(c, eps=s["norm_eps"])
        self.qkv = nn.Linear(c, (self.h + 2 * self.k) * self.d, bias=False)
        self.o = nn.Linear(self.h * self.d, c, bias=False)
        self.gate_up = nn.Linear(c, 2 * s["intermediate_size"], bias=False)
        self.down = nn.Linear(s["intermediate_size"], c, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, self.h + 2 * self.k, self.d).transpose(1, 2)
        q, k, v = qkv.split([self.h, self.k, self.k], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, self.h * self.d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class Model(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(s["vocab_size"], s["hidden_size"])
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s["n_layers"]))
        self.norm = nn.RMSNorm(s["hidden_size"], eps=s["norm_eps"])
        frequency = s["rope_theta"] ** (-torch.arange(0, s["head_dim"], 2) / s["head_dim"])
        angle = torch.outer(torch.arange(s["seq_len"]), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)  # the output layer is the embedding
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def attention(variant):
    if variant != "cudnn":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def measure(variant, shape, device, n_steps):
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(shape)
        ids = torch.randint(shape["vocab_size"], (shape["n_rows"], shape["seq_len"] + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    step = torch.compile(model) if on_gpu else model
    seconds = []
    for i in range(n_steps + 3 if n_steps else 1):  # the first compiles
        wait()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with attention(variant), torch.autocast(device, torch.bfloat16):
            loss = step(ids[:, :-1], ids[:, 1:])
        with attention(variant):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        wait()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[3:] or seconds)
    return {
        "step_ms": 1e3 * median, "tokens_per_s": shape["n_rows"] * shape["seq_len"] / median, "loss": value,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
    }


def end_with(parent):
    """Ends this process soon after its parent, which may be killed, so that it does not disturb later measurements."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main():
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shape", type=json.loads, default=LLAMA_1B)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for variant in ["default", "cudnn"] if args.device == "cuda" else ["default"]:
        line = {"torch": torch.__version__, "attention": variant}
        try:
            line |= measure(variant, args.shape, args.device, args.steps)
        except Exception as error:  # the other variant may still run
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps(line), flush=True)


main()
