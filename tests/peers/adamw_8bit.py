"""Writes golden numbers of AdamW with averages in 8 bits, as bitsandbytes computes them on the CPU.

    python tests/peers/adamw_8bit.py > runtime/cpu/src/kernels/optimizer/adamw_8bit_golden.txt

Codes are those of the nearest numbers, as bitsandbytes computes them on GPUs, and on the CPU for types other than f32, bf16 and f16.
(For these three its CPU code looks codes up in a table that is too coarse for small numbers: 0 gets the code of 3e-5.)

Needs torch and bitsandbytes; the first line of the output names their versions. Each further line is a name and numbers in
hexadecimal: f32 numbers as their bits, or codes. The tests of `phalanx_cpu::kernels::optimizer` make the same updates.
"""

import struct

import bitsandbytes
import torch
from bitsandbytes.backends.cpu import ops

# Whole blocks and a short one; and a tensor too small for blocks.
SIZES = {"coded": 4096 + 2 * 256 + 37, "plain": 4000}
STEPS = 6
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def nearest_codes(state, code, absmax, out, blocksize):
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(state.double(), code, blocksize)
    out.copy_(codes)
    absmax.copy_(scales)


ops._quant_blockwise_fp32_direct = nearest_codes


def numbers(n, seed):
    """Exact in f32."""
    return torch.tensor([((i * 7919 + 104729 * seed + 13) % 2003 - 1001) / 1024 for i in range(n)], dtype=torch.float32)


def gradient(n, step):
    """Elements of very different magnitudes, some of them zero; exact in f32."""
    sizes = torch.tensor([0.0, 1.0, 2.0**-4, 2.0**-10, 2.0**3, 2.0**-20], dtype=torch.float32)
    return numbers(n, step) * sizes.repeat(n // 6 + 1)[:n]


def show(name, words, width):
    print(name, *(f"{word:0{width}x}" for word in words))


def bits(values):
    return [struct.unpack("<I", struct.pack("<f", x))[0] for x in values.reshape(-1).tolist()]


print(f"# bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}")
for name, n in SIZES.items():
    p = torch.nn.Parameter(numbers(n, 0))
    optimizer = bitsandbytes.optim.AdamW8bit([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    for step in range(1, STEPS + 1):
        p.grad = gradient(n, step)
        optimizer.step()
        state = optimizer.state[p]
        if step in (1, STEPS):
            show(f"{name}_p_{step}", bits(p.data)[::7], 8)
        if step in (1, STEPS) and name == "coded":
            for i in (1, 2):
                show(f"codes{i}_{step}", state[f"state{i}"].reshape(-1).tolist(), 2)
                show(f"scales{i}_{step}", bits(state[f"absmax{i}"]), 8)
