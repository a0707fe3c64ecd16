"""Against outside oracles: transformers for logits and tokens, gguf for Q8_0 blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from conftest import CHECKPOINTS, DEMO, GOLDEN

from qwen_rs import LLM, Model, quantize_q8_0


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    cache = model.new_cache()
    token = int(model.prefill(cache, prompt)[0].argmax())
    tokens = [token]
    while len(tokens) < count:
        token = int(model.decode(cache, token).argmax())
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("name", [*CHECKPOINTS, "demo"])
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str) -> None:
    directory = DEMO if name == "demo" else GOLDEN / name
    golden = np.load(GOLDEN / "demo.npz" if name == "demo" else directory / "golden.npz")
    model = Model.load(directory, dtype="f32")
    prompt = golden["prompt"].tolist()
    logits = model.prefill(model.new_cache(), prompt, all_logits=True)
    largest = np.abs(golden["logits"]).max()
    error = np.abs(logits - golden["logits"]).max() / largest
    print(f"{name}: largest difference {error:.2e} of the largest logit")
    assert error <= 1e-4
    assert greedy(model, prompt, 64) == golden["greedy"].tolist()


def test_q8_0_is_close_to_f32_on_the_demo_model(demo: LLM, demo_f32: Model) -> None:
    text = "She had been a friend and companion such as few possessed, intelligent, well-informed, gentle"
    prompt = demo.tokenizer.encode(text)
    q8_0 = demo.model.prefill(demo.model.new_cache(), prompt, all_logits=True).astype(np.float64)
    f32 = demo_f32.prefill(demo_f32.new_cache(), prompt, all_logits=True).astype(np.float64)

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(f32), log_softmax(q8_0)
    divergence = float((np.exp(p) * (p - q)).sum(-1).mean())
    a, b = greedy(demo.model, prompt, 64), greedy(demo_f32, prompt, 64)
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), 64)
    print(f"Q8_0 against F32: mean KL divergence {divergence:.6f}; first {same} of 64 greedy tokens the same")
    assert divergence <= 0.01


@pytest.mark.parametrize("seed", range(4))
def test_q8_0_blocks_are_those_of_gguf(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(32 * 500).astype(np.float32) * 10.0 ** rng.integers(-6, 4, 1)
    # Blocks of zeros, of one value, of halves (where rounding is decided), of tiny values, and of values
    # whose scale is a denormal float with a finite inverse.
    values[:32] = 0
    values[32:64] = -3.25
    values[64:96] = np.arange(32) - 15.5
    values[95] = 127.0
    values[96:128] = 1e-30
    values[128:160] = rng.standard_normal(32) * 1e-37
    values[150] = 6e-37
    values = values.astype(np.float32)
    expected = gguf.quantize(values.reshape(1, -1), gguf.GGMLQuantizationType.Q8_0)
    assert quantize_q8_0(values).tobytes() == expected.tobytes()
