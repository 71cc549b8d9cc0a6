"""Compares files of llama.cpp's mixtures `Q4_K_M` and `Q5_K_M` with those that llama.cpp itself makes of the same weights.

usage: PYTHON tests/peers/k_quants.py PHALANX MODEL_DIR TEXT_FILE

PYTHON has the packages `gguf`, `safetensors`, `tokenizers` and `xllamacpp`, which has llama.cpp compiled. MODEL_DIR is a small trained Llama with
tied embeddings, whose rows are too short for blocks of 256 weights (such as TinyStories 260K): its rows are made longer, in a way
that leaves its function as it is.

1. Each tensor has the type that llama.cpp's mixture gives it.
2. The package `gguf` reads the weights with an error that is no larger than that of llama.cpp's own quantiser (`ggml_quantize_chunk`).
3. llama.cpp itself computes with each file: the divergence of its probabilities from those of the f32 file, over a text, is no larger than with
   the weights as llama.cpp quantises them. Perplexities, which move either way by chance, are told with greedy text.
"""

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

WIDTH, N_TOKENS, ROOM = 256, 160, 1.1
KINDS = ["f32", "q8_0", "q5_k_m", "q4_k_m"]
ggml = ctypes.CDLL(next(str(path) for path in Path(xllamacpp.__path__[0]).glob("*.so")))
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t


def widened(source: Path, target: Path) -> None:
    """The same function in a model of width 256: the residual stream and the values of heads are rotated into more dimensions, gains of
    norms move into the matrices behind them, rotary pairs keep their frequencies, and inner vectors get zeros."""
    config = json.loads((source / "config.json").read_text())
    weights = {name: w.astype(np.float64) for name, w in load_file(source / "model.safetensors").items()}
    rng = np.random.default_rng(1)
    heads, kv_heads, old_d, old = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"))
    d, ffn = WIDTH // heads, -(-config["intermediate_size"] // WIDTH) * WIDTH
    basis = lambda n, m: np.linalg.qr(rng.normal(size=(n, m)))[0]
    # The root mean square of a stream of `old` dims, spread over 256, is that of before with this factor.
    stream = basis(WIDTH, old) * np.sqrt(WIDTH / old)
    into = stream / (WIDTH / old)
    values = [basis(d, old_d) for _ in range(kv_heads)]
    # Pair i of a narrow head turns like pair i * d / old_d of a wide one; the two halves of a head have the pairs' two members.
    wide = np.zeros((d, old_d))
    for i in range(old_d // 2):
        wide[i * d // old_d, i] = wide[d // 2 + i * d // old_d, old_d // 2 + i] = 1
    rotary = lambda w, n: np.concatenate([wide @ head for head in np.split(w, n)])
    inner = lambda w: np.concatenate([w, np.zeros((ffn - len(w), w.shape[1]))])
    new = {}
    for name, w in weights.items():
        part = name.split(".")[-2]
        block = name.rsplit(".", 3)[0] if ".layers." in name else ""
        before = weights.get(f"{block}.input_layernorm.weight")
        after = weights.get(f"{block}.post_attention_layernorm.weight")
        new[name] = {
            "embed_tokens": lambda: w @ stream.T,
            "q_proj": lambda: rotary(w * before @ into.T, heads) * np.sqrt(d / old_d),
            "k_proj": lambda: rotary(w * before @ into.T, kv_heads),
            "v_proj": lambda: np.concatenate([v @ h for v, h in zip(values, np.split(w * before @ into.T, kv_heads))]),
            "o_proj": lambda: stream @ np.concatenate([h @ values[i * kv_heads // heads].T
                                                       for i, h in enumerate(np.split(w, heads, axis=1))], axis=1),
            "gate_proj": lambda: inner(w * after @ into.T),
            "up_proj": lambda: inner(w * after @ into.T),
            "down_proj": lambda: stream @ inner(w.T).T,
        }.get(part, lambda: np.ones(WIDTH))()
    new["lm_head.weight"] = weights["model.embed_tokens.weight"] * weights["model.norm.weight"] @ into.T
    config |= {"hidden_size": WIDTH, "head_dim": d, "intermediate_size": ffn, "tie_word_embeddings": False}
    target.mkdir()
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(w, np.float32) for name, w in new.items()}, target / "model.safetensors")


def expected_type(name: str, kind: str, n_blocks: int) -> Type:
    """The rule of llama.cpp's mixtures, for models of fewer than 80 blocks."""
    most = {"q4_k_m": Type.Q4_K, "q5_k_m": Type.Q5_K}[kind]
    if name == "output.weight":
        return Type.Q6_K
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        block = int(name.split(".")[1])
        if block < n_blocks // 8 or block >= 7 * n_blocks // 8 or (block - n_blocks // 8) % 3 == 2:
            return Type.Q6_K
    return most


def of_llama_cpp(values: np.ndarray, kind: Type) -> np.ndarray:
    """The weights as llama.cpp quantises them, in bytes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    bytes_ = np.zeros((values.shape[0], values.shape[1] // block * size), np.uint8)
    at = lambda array: array.ctypes.data_as(ctypes.c_void_p)
    n = [ctypes.c_int64(n) for n in (0, *values.shape)]
    assert ggml.ggml_quantize_chunk(int(kind), at(values), at(bytes_), *n, None) == bytes_.size
    return bytes_


def compare_weights(folder: Path, kind: str) -> None:
    """Compares the file of a kind with that of f32, and writes a copy that has llama.cpp's own blocks."""
    whole = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "f32.gguf").tensors}
    shutil.copy(folder / f"{kind}.gguf", folder / f"{kind}-llama.cpp.gguf")
    theirs = gguf.GGUFReader(folder / f"{kind}-llama.cpp.gguf", "r+")
    n_blocks = int(theirs.fields["llama.block_count"].contents())
    assert theirs.fields["general.file_type"].contents() == {"q4_k_m": 15, "q5_k_m": 17}[kind]
    errors: dict[str, list[tuple[float, float, int]]] = {}
    for tensor in theirs.tensors:
        exact = np.array(whole[tensor.name].data)
        if exact.ndim == 1:
            assert np.array_equal(tensor.data, exact), tensor.name
            continue
        assert tensor.tensor_type == expected_type(tensor.name, kind, n_blocks), (tensor.name, tensor.tensor_type)
        peer = of_llama_cpp(exact, tensor.tensor_type)
        squares = [float(((gguf.dequantize(data, tensor.tensor_type).astype(np.float64) - exact) ** 2).sum())
                   for data in (np.array(tensor.data), peer)]
        assert squares[0] <= squares[1] * 1.01, f"{tensor.name} ({tensor.tensor_type.name}): {squares[0]} and {squares[1]}"
        errors.setdefault(tensor.tensor_type.name, []).append((*squares, float((exact**2).sum())))
        tensor.data[:] = peer
    theirs.data.flush()
    for name, rows in sorted(errors.items()):
        ours, peer, size = np.sum(rows, axis=0)
        print(f"{kind}: {len(rows):2} tensors of {name}: RMS error {np.sqrt(ours / size):.4%} of the weights' RMS, "
              f"{np.sqrt(peer / size):.4%} by llama.cpp's quantiser")


class Model:
    """A file, computed by llama.cpp."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = 256, 1, 0, False, False
        params.cpuparams.n_threads = 2
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server, self.n_vocab = xllamacpp.Server(params), n_vocab

    def log_probs(self, ids: list[int]) -> np.ndarray:
        answer = self.server.handle_completions({"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": self.n_vocab})
        told = answer["choices"][0]["logprobs"]
        found = np.full(self.n_vocab, np.nan)
        for entry in told["content"][0]["top_logprobs"] if told else []:
            found[entry["id"]] = entry["logprob"]
        return found

    def greedy(self, prompt: str) -> str:
        answer = self.server.handle_completions({"prompt": prompt, "n_predict": 40, "temperature": 0})
        return answer["choices"][0]["text"]


def main() -> None:
    phalanx, source, text = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).read_text()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = tokenizer.encode(text[:4000]).ids[:N_TOKENS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        widened(source, folder / "model")
        for kind in KINDS:
            subprocess.run([phalanx, "export", folder / "model", folder / f"{kind}.gguf", "--gguf", kind], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([phalanx, "export", source, folder / "narrow.gguf", "--gguf", "f32"], check=True, stdout=subprocess.DEVNULL)
        compare_weights(folder, "q5_k_m")
        compare_weights(folder, "q4_k_m")
        perplexity, divergence, exact = {}, {}, None
        for kind in ["narrow", "f32", "q8_0", "q5_k_m", "q5_k_m-llama.cpp", "q4_k_m", "q4_k_m-llama.cpp"]:
            path = folder / f"{kind}.gguf"
            model = Model(path, tokenizer.get_vocab_size())
            told = np.stack([model.log_probs(ids[:n]) for n in range(1, len(ids))])
            # A token that is a part of a character has no probabilities in llama.cpp's answer.
            losses = np.array([-row[target] for row, target in zip(told, ids[1:])])
            known = ~np.isnan(losses)
            assert known.sum() > 100, known.sum()
            perplexity[kind] = float(np.exp(losses[known].mean()))
            exact = told if kind == "f32" else exact
            if exact is not None:
                divergence[kind] = float(np.nansum(np.exp(exact) * (exact - told), axis=1)[known].mean())
            print(f"{kind:17} {path.stat().st_size:9} bytes, perplexity {perplexity[kind]:.4f}, divergence from f32 {divergence.get(kind, 0):.1e}: "
                  f"{model.greedy('Once upon a time')!r}")
        assert abs(perplexity["narrow"] / perplexity["f32"] - 1) < 1e-3, "the wide model is another one"
        for kind in ["q5_k_m", "q4_k_m"]:
            ours, peer = divergence[kind], divergence[f"{kind}-llama.cpp"]
            assert ours <= peer * ROOM, f"{kind} diverges by {ours:.1e}, and by {peer:.1e} with llama.cpp's blocks"


if __name__ == "__main__":
    main()
