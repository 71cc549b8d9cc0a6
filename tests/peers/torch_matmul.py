"""The products of runtime/cpu/benches/matmul.rs in PyTorch on two threads: median GFLOP/s per layout and shape.

    python tests/peers/torch_matmul.py [seconds per product]

PyTorch overwrites the gradient of a weight; Phalanx adds to it.
"""

import statistics
import sys
import time

import torch

FORWARD = [(1024, 1536, 512), (1024, 512, 512), (1024, 2816, 512), (1024, 512, 1408), (1024, 4096, 512)]
INPUT_GRADIENT = [(1024, 512, 1536), (1024, 512, 512), (1024, 512, 2816), (1024, 1408, 512), (1024, 512, 4096)]
WEIGHT_GRADIENT = [(1536, 512, 1024), (512, 512, 1024), (2816, 512, 1024), (512, 1408, 1024), (4096, 512, 1024)]


def median_gflops(layout, m, n, k, dtype, seconds):
    a = torch.randn(k, m).to(dtype).t() if layout == "TN" else torch.randn(m, k).to(dtype)
    b = torch.randn(n, k).to(dtype).t() if layout == "NT" else torch.randn(k, n).to(dtype)
    c = torch.empty(m, n, dtype=dtype)
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        times.append(time.perf_counter() - start)
    return 2 * m * n * k / statistics.median(times) / 1e9


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.7
    torch.set_num_threads(2)
    print("layout shape f32 bf16")
    for layout, shapes in [("NT", FORWARD), ("NN", INPUT_GRADIENT), ("TN", WEIGHT_GRADIENT)]:
        for m, n, k in shapes:
            f32, bf16 = (median_gflops(layout, m, n, k, t, seconds) for t in (torch.float32, torch.bfloat16))
            print(f"{layout} {m}x{n}x{k} {f32:.0f} {bf16:.0f}")


if __name__ == "__main__":
    main()
