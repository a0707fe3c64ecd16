"""Makes the golden data in ``tests/golden``: tiny random checkpoints and what transformers says of them.

    pip install torch transformers safetensors numpy
    python tests/make_golden.py

Each checkpoint is written by ``save_pretrained``; ``golden.npz`` beside it holds a prompt, the
logits of all its positions in F32, and 64 greedy tokens. ``demo.npz`` holds the same for the bundled
demo model. ``chat/rendered.json`` holds conversations as transformers renders them through
``chat/chat_template.jinja``, which is written by hand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROOT = Path(__file__).resolve().parent
GOLDEN = ROOT / "golden"
CHAT = GOLDEN / "chat"
DEMO = ROOT.parent / "python" / "qwen_rs" / "demo"

# name: (fields of the config, qwen3 unless they say otherwise; dtype of the files; shard size)
CHECKPOINTS: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    # 4 query heads share a KV head; heads wider than hidden / heads; hidden not a multiple of 64
    "gqa_4_1": (
        {
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 320,
            "tie_word_embeddings": True,
        },
        torch.float32,
        "1GB",
    ),
    # every query head has its own; untied head; several shards; F16 files
    "mha_untied_sharded": (
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 288,
            "tie_word_embeddings": False,
        },
        torch.float16,
        "60KB",
    ),
    # 8 query heads share the only KV head; sizes that fill no block and no vector; BF16 files
    "mqa_8_1_odd_sizes": (
        {
            "hidden_size": 72,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "vocab_size": 301,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        "1GB",
    ),
    # the released models' head_dim; another RoPE base and epsilon; the old config spelling
    "head_dim_128_old_spelling": (
        {
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 256,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
            "rms_norm_eps": 1e-5,
        },
        torch.bfloat16,
        "1GB",
    ),
    # a head_dim of 64 with an odd number of query heads in a group
    "gqa_3_1": (
        {
            "hidden_size": 80,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 272,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        "1GB",
    ),
}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter in <Zürich> & "Genève"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "Grüß dich, 你好 👋 <b>&amp;</b>\n\n  two  spaces "}
CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    ([USER], {"enable_thinking": True}),
    ([USER], {"enable_thinking": False}),
    ([{"role": "system", "content": "Be brief."}, USER], {"enable_thinking": False}),
    ([USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}, USER], {}),
    (
        [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}],
        {"add_generation_prompt": False},
    ),
    ([USER, {"role": "assistant", "reasoning_content": "so", "content": "Hi"}], {}),
    ([USER], {"tools": TOOLS}),
    (
        [
            {"role": "system", "content": "Use tools."},
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "function": {
                            "name": "weather",
                            "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]},
                        }
                    },
                    {"name": "weather", "arguments": '{"city": "Bern"}'},
                ],
            },
            {"role": "tool", "content": "12 °C"},
            {"role": "tool", "content": "13 °C"},
        ],
        {"tools": TOOLS, "enable_thinking": False},
    ),
]


def render_conversations() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = (CHAT / "chat_template.jinja").read_text(encoding="utf-8")
    rendered = []
    for messages, options in CONVERSATIONS:
        options = {"add_generation_prompt": True, **options}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        rendered.append({"messages": messages, "options": options, "text": text})
    path = CHAT / "rendered.json"
    path.write_text(json.dumps(rendered, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def random_model(fields: dict[str, Any], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    defaults = {
        "model_type": "qwen3",
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**defaults, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:  # large enough that attention is far from uniform and greedy text does not repeat
                parameter.copy_(torch.randn_like(parameter) * (1.5 / parameter.shape[-1] ** 0.5))
    return model.eval()


@torch.no_grad()
def golden(model: Any, prompt: list[int]) -> dict[str, np.ndarray]:
    ids = torch.tensor([prompt])
    logits = model(input_ids=ids).logits[0].float().numpy()
    tokens = list(prompt)
    margin = float("inf")
    for _ in range(64):
        last = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
        best = last.topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        tokens.append(int(last.argmax()))
    print(f"  largest logit {np.abs(logits).max():.3f}, smallest margin of a greedy step {margin:.5f}")
    return {
        "prompt": np.array(prompt, dtype=np.int64),
        "logits": logits,
        "greedy": np.array(tokens[len(prompt) :], dtype=np.int64),
    }


def main() -> None:
    render_conversations()
    for seed, (name, (fields, dtype, shard)) in enumerate(CHECKPOINTS.items()):
        print(name)
        directory = GOLDEN / name
        shutil.rmtree(directory, ignore_errors=True)
        model = random_model(fields, seed).to(dtype)
        model.save_pretrained(directory, max_shard_size=shard)
        if name.endswith("old_spelling"):
            path = directory / "config.json"
            config = json.loads(path.read_text())
            config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
            config["rope_scaling"] = None
            config["torch_dtype"] = config.pop("dtype")
            path.write_text(json.dumps(config, indent=2) + "\n")
        prompt = np.random.default_rng(seed).integers(0, fields["vocab_size"], 40).tolist()
        # Loaded again, so that what is not stored (RoPE frequencies) is computed in F32.
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        np.savez_compressed(directory / "golden.npz", **golden(model, prompt))
    print("demo")
    demo = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    prompt = np.random.default_rng(7).integers(3, 4096, 24).tolist()
    np.savez_compressed(GOLDEN / "demo.npz", **golden(demo, prompt))


if __name__ == "__main__":
    main()
