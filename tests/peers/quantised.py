"""Writes the golden numbers of quantised weights, as bitsandbytes computes them on the CPU.

    python tests/peers/quantised.py > runtime/device/src/packed/golden.txt

Needs torch and bitsandbytes; the first line of the output names their versions. Each further line is a name and 32-bit words in
hexadecimal: numbers as the bits of f32, or a checksum of codes. The tests of `phalanx_device::packed` compute the same from the
same weights.
"""

import struct

import bitsandbytes
import bitsandbytes.functional as F
import torch

ROWS, COLUMNS = 75, 256


def weights():
    """Numbers of several magnitudes, exact in f32, with the largest one of each block at another place."""
    n = ROWS * COLUMNS
    numbers = [((i * 7919 + 13) % 2003 - 1001) * (1 + (i // 64 * 31) % 7) / 65536 for i in range(n)]
    return torch.tensor(numbers, dtype=torch.float32).reshape(ROWS, COLUMNS)


def words(numbers):
    return [struct.unpack("<I", struct.pack("<f", x))[0] for x in numbers]


def checksum(codes):
    total = 0
    for code in codes:
        total = (total * 31 + code) % 2**32
    return [total]


def show(name, of):
    print(name, *(f"{word:x}" for word in of))


def nf4(double):
    packed, state = F.quantize_4bit(weights(), blocksize=64, quant_type="nf4", compress_statistics=double)
    pairs = packed.reshape(-1).tolist()
    codes = [code for pair in pairs for code in (pair >> 4, pair & 15)]
    scales = state.absmax
    if double:
        scales = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
    numbers = F.dequantize_4bit(packed, state).reshape(-1)
    if double:
        return show("nf4_double_scales", words(scales.tolist()))
    show("nf4_codes", checksum(codes))
    show("nf4_scales", words(scales.tolist()))
    show("nf4_numbers", checksum(words(numbers.tolist())))


def int8():
    codes, scales, _ = F.int8_vectorwise_quant(weights().half())
    numbers = F.int8_vectorwise_dequant(codes, scales).float()
    show("int8_codes", checksum(x % 256 for x in codes.reshape(-1).tolist()))
    show("int8_scales", words(scales.tolist()))
    show("int8_numbers", checksum(words(numbers.reshape(-1).tolist())))


print(f"# bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}")
show("signed_map", words(F.create_dynamic_map(signed=True).tolist()))
show("unsigned_map", words(F.create_dynamic_map(signed=False).tolist()))
nf4(double=False)
nf4(double=True)
int8()
