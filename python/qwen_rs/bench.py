"""Shapes of the released models, for measuring with random weights."""

from __future__ import annotations

from typing import Any


def _shape(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


SHAPES = {
    "0.6b": _shape(1024, 3072, 28, 16, True),
    "1.7b": _shape(2048, 6144, 28, 16, True),
    "4b": _shape(2560, 9728, 36, 32, True),
}
"""``config.json`` of Qwen3 0.6B, 1.7B and 4B."""
