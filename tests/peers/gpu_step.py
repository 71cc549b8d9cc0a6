"""Times the training step of a Llama on one GPU in PyTorch, beside the same step of `phalanx-gpu`; prints a line of JSON per variant.

usage: gpu_step.py [--device cuda|cpu] [--steps N] [--shape JSON] [--variants NAME,NAME,...] [--read-loss-every N] [--wait FILE] [--hold FILE]
`phalanx-gpu all --python PROGRAM` runs this file and gives the shape of its own step; the default is Llama 3.2 1B, 2 rows of 4096.
`--steps 0` only compiles. `--wait FILE` compiles every variant, frees its memory, and measures when FILE exists; the compiled code
is kept in the folder TORCHINDUCTOR_CACHE_DIR, also for later processes. `--hold FILE` measures when FILE exists, too, but each variant waits
after its first steps, with all that they have made.

Every variant is `torch.compile` of the model with bf16 autocast over float32 weights, AdamW and a clipped gradient norm. Its name is
"default", or parts joined with "+":
  cudnn           attention of cuDNN only, instead of PyTorch's own choice
  graphs          mode="reduce-overhead": CUDA graphs of the forward and of the backward pass
  max-autotune    mode="max-autotune": the same, with the fastest of Triton's and cuBLAS's products
  tuned           mode="max-autotune-no-cudagraphs"
  chunks          head and cross-entropy by rows, their gradients beside them, so that no logits of all rows are in memory
  update          clipping and AdamW are compiled too, instead of the fused AdamW behind a multi-tensor clip
  whole           the whole step, with clipping and AdamW, is one CUDA graph
"best" is tuned+update+whole, "lean" is tuned+chunks+update+whole. A variant that cannot run prints its error.
"""
import argparse
import contextlib
import gc
import json
import os
import statistics
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.adamw import adamw

LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8,
    "head_dim": 64, "rope_theta": 500000.0, "norm_eps": 1e-5, "n_rows": 2, "seq_len": 4096,
}
NAMED = {"best": "tuned+update+whole", "lean": "tuned+chunks+update+whole"}
MODES = {"graphs": "reduce-overhead", "max-autotune": "max-autotune", "tuned": "max-autotune-no-cudagraphs"}
PARTS = {"default", "cudnn", "chunks", "update", "whole", *MODES}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
FUNCTIONAL = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}
CHUNK = 2048  # rows
N_WARM_UP = 5  # the first step compiles, the second one records the graphs of PyTorch's modes


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


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of a linear head without its logits in memory: forward computes both gradients, chunk by chunk of rows."""

    @staticmethod
    def forward(ctx, x, weight, labels):
        w = weight.bfloat16()
        total, dx, dw = 0.0, [], 0.0
        for rows, targets in zip(x.bfloat16().split(CHUNK), labels.split(CHUNK)):
            logits = (rows @ w.T).float()
            lse = logits.logsumexp(-1, keepdim=True)
            total = total + (lse - logits.gather(-1, targets[:, None])).sum()
            is_target = torch.arange(w.shape[0], device=w.device) == targets[:, None]
            dlogits = (((logits - lse).exp() - is_target.float()) / len(x)).bfloat16()
            dx.append(dlogits @ w)
            dw = dw + (dlogits.T @ rows).float()
        ctx.save_for_backward(torch.cat(dx), dw)
        return total / len(x)

    @staticmethod
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors
        return dloss * dx, dloss * dw, None


class Model(nn.Module):
    def __init__(self, s, in_chunks):
        super().__init__()
        self.in_chunks = in_chunks
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
        x = self.norm(x).flatten(0, 1)
        if self.in_chunks:
            return ChunkedLoss.apply(x, self.embed.weight, labels.flatten())  # the output layer is the embedding
        return F.cross_entropy(F.linear(x, self.embed.weight).float(), labels.flatten())


def attention(parts):
    if "cudnn" not in parts:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


class Update:
    """Clips the gradients and runs the fused AdamW."""

    def __init__(self, params, capturable):
        self.params = params
        self.optimizer = torch.optim.AdamW(params, **ADAMW, fused=True, capturable=capturable)

    def __call__(self):
        nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.optimizer.step()


class CompiledUpdate:
    """PyTorch's AdamW as a compiled function that clips the gradients where it reads them."""

    def __init__(self, params, _):
        zeros = lambda: [torch.zeros_like(p) for p in params]  # noqa: E731
        averages, squares, steps = zeros(), zeros(), [torch.zeros((), device=p.device) for p in params]

        def update(grads, norm):
            grads = torch._foreach_mul(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
            adamw(params, grads, averages, squares, [], steps, foreach=True, capturable=True, **FUNCTIONAL)

        self.params, self.update = params, torch.compile(torch.no_grad()(update), fullgraph=True)

    def __call__(self):
        grads = [p.grad for p in self.params]
        self.update(grads, nn.utils.get_total_norm(grads, foreach=True))


class Whole:
    """Runs the first `N_WARM_UP` steps one by one, then records one as a CUDA graph and replays it.

    If it cannot be recorded, steps go on one by one, and `about` tells why.
    """

    def __init__(self, step, about):
        self.step, self.about, self.n_eager, self.graph = step, about, N_WARM_UP, None

    def __call__(self):
        if self.n_eager:
            self.n_eager -= 1
            return self.step()
        if self.graph is None:
            try:
                self.graph, self.loss = recorded(self.step)
            except RuntimeError as error:
                self.about["not_whole"], self.n_eager = str(error)[:500], 1 << 60
                return self.step()
        self.graph.replay()
        return self.loss


def recorded(step):
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        loss = step()
    return graph, loss


def prepare(variant, args):
    """The step of a variant, which returns its loss, and what a line tells of it."""
    parts = set(NAMED.get(variant, variant).split("+"))
    if unknown := parts - PARTS:
        raise ValueError(f"unknown parts: {', '.join(sorted(unknown))}")
    on_gpu, shape = args.device == "cuda", args.shape
    if on_gpu:  # a graph is recorded on the stream of the steps before it, and not on the default one
        torch.cuda.set_stream(torch.cuda.Stream() if "whole" in parts else torch.cuda.default_stream())
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Model(shape, "chunks" in parts)
        tokens = torch.randint(shape["vocab_size"], (shape["n_rows"], shape["seq_len"] + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    update = (CompiledUpdate if "update" in parts else Update)(list(model.parameters()), on_gpu and "whole" in parts)
    forward = torch.compile(model, mode=next((MODES[part] for part in parts if part in MODES), None))

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)  # before the forward pass: a graph that is replayed writes its gradients again
        with attention(parts):
            with torch.autocast(args.device, torch.bfloat16):
                loss = forward(ids, labels)
            loss.backward()
        update()
        return loss.detach()

    about = {"attention": variant, "parameters": sum(p.numel() for p in model.parameters())}
    return Whole(step, about) if "whole" in parts and on_gpu else step, shape["n_rows"] * shape["seq_len"], about


def measure(variant, args, prepare):
    """Prepares a variant and times `args.steps` of its steps."""
    on_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    begin = time.perf_counter()
    step, n_tokens, line = prepare(variant, args)
    losses = [step().item()]
    line |= {"seconds": time.perf_counter() - begin, "device": torch.cuda.get_device_name() if on_gpu else "CPU"}
    if args.steps == 0:
        return line | {"losses": losses}
    if on_gpu:  # what the compiler tried is not the step's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses += [step().item() for _ in range(N_WARM_UP - 1)]
    step()  # records the graph of the whole step
    wait()
    await_file(args.hold)
    milliseconds = []
    for _ in range(0, args.steps, args.read_loss_every):
        wait()
        begin = time.perf_counter()
        for _ in range(args.read_loss_every - 1):
            step()
        value = step().item()
        wait()
        milliseconds.append(1e3 * (time.perf_counter() - begin) / args.read_loss_every)
    median = statistics.median(milliseconds)
    return line | {
        "step_ms": median, "least_ms": min(milliseconds), "tokens_per_s": 1e3 * n_tokens / median, "losses": losses, "loss": value,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
    }


def await_file(path):
    while path and not os.path.exists(path):
        time.sleep(0.05)


def attempt(variant, args, prepare):
    """The line of a variant, or its error; frees what it had."""
    try:
        line = measure(variant, args, prepare)
    except Exception as error:  # other variants may still run
        line = {"attention": variant, "error": f"{type(error).__name__}: {error}"[:500]}
    torch.compiler.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return {"torch": torch.__version__} | line


def end_with(parent):
    """Ends this process soon after its parent, which may be killed, so that it does not disturb later measurements."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def run(document, add_arguments, variants, prepare):
    """Reads the command line, and measures its variants."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variants", type=lambda names: names.split(","), default=variants)
    parser.add_argument("--read-loss-every", type=int, default=1)
    parser.add_argument("--wait", metavar="FILE")
    parser.add_argument("--hold", metavar="FILE")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if args.wait:
        for variant in args.variants:
            line = attempt(variant, argparse.Namespace(**vars(args) | {"steps": 0}), prepare)
            print(json.dumps({"compiled": variant, "seconds": line.get("seconds"), "error": line.get("error")}), flush=True)
        await_file(args.wait)
    for variant in args.variants:
        print(json.dumps(attempt(variant, args, prepare)), flush=True)


if __name__ == "__main__":
    run(__doc__, lambda parser: parser.add_argument("--shape", type=json.loads, default=LLAMA_1B), ["default", "cudnn"], prepare)
