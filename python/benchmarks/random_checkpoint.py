"""Writes a random checkpoint of exactly the shape of a released Qwen3 model, for measuring.

    python python/benchmarks/random_checkpoint.py 0.6b /tmp/qwen3-0.6b-random

BF16 safetensors as ``save_pretrained`` writes them, with the demo model's tokenizer and a word for each id
that it lacks, so that ``qwen-rs generate --model`` runs it and a stream shows every token; the text means
nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np

import qwen_rs
from qwen_rs.bench import SHAPES


def tensors(config: dict[str, object]) -> dict[str, list[int]]:
    """Every tensor's name and shape."""
    c = {k: int(v) for k, v in config.items() if isinstance(v, int)}
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [c["vocab_size"], hidden]
    for i in range(c["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": [hidden],
            "self_attn.q_proj": [q, hidden],
            "self_attn.k_proj": [kv, hidden],
            "self_attn.v_proj": [kv, hidden],
            "self_attn.q_norm": [head],
            "self_attn.k_norm": [head],
            "self_attn.o_proj": [hidden, q],
            "post_attention_layernorm": [hidden],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    return shapes


def write(directory: Path, shape: str, seed: int = 0) -> None:
    """Writes the checkpoint; the same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    rng = np.random.default_rng(seed)
    # Written as it is made: the format is an 8-byte length, a JSON header, then the bytes.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims in tensors(config).items():
        start, end = end, end + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for dims in tensors(config).values():
            if len(dims) == 1:
                values = np.ones(dims, np.float32)
            else:
                values = rng.standard_normal(dims, np.float32) * np.float32(0.02)
            file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    # What released checkpoints say beside their shape; some engines ask for it.
    said = {"max_window_layers": config["num_hidden_layers"], "use_sliding_window": False}
    (directory / "config.json").write_text(json.dumps(config | said, indent=2) + "\n")
    demo = Path(qwen_rs.__file__).parent / "demo"
    shutil.copy(demo / "tokenizer_config.json", directory)
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"x{i}": i for i in range(int(config["vocab_size"])) if i not in known}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    write(args.directory, args.shape)
