"""Reads and writes safetensors files, from which both sides of a comparison start, with only PyTorch."""

import json

import torch

DTYPES = {"F32": torch.float32, "I32": torch.int32}


def read(path):
    """Tensors by name."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        payload = bytearray(file.read())
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            flat = torch.frombuffer(payload, dtype=DTYPES[about["dtype"]], count=(end - start) // 4, offset=start)
            tensors[name] = flat.reshape(about["shape"])
    return tensors


def write(path, tensors):
    """Writes tensors of f32."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + 4 * tensor.numel()]}
        at += 4 * tensor.numel()
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().numpy().tobytes())
