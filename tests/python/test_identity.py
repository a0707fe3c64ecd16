"""The same bits on every machine: the demo model's logits for one prompt are stored, and every machine
that runs this must reproduce them, on each instruction set that it has."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from conftest import DEMO, GOLDEN

from qwen_rs import LLM, Model, SamplingParams, available_isas
from qwen_rs.engine.options import BLOCK_ROWS, DTYPES

PROMPT_LENGTH = 280  # longer than an attention chunk


def demo_bits(dtype: str, threads: int, kv_dtype: str, backend: str = "simd") -> str:
    """SHA-256 of the bits of the logits of all positions of a fixed prompt, then of 8 decode steps."""
    options = {} if backend == "scalar" else {"threads": threads}
    model = Model.load(DEMO, dtype=dtype, backend=backend, **options)
    prompt = [(i * i * 31 + 7 * i + 5) % 4096 for i in range(PROMPT_LENGTH)]
    cache = model.new_cache("basic", kv_dtype=kv_dtype)
    digest = hashlib.sha256(model.prefill(cache, prompt, all_logits=True).astype("<f4").tobytes())
    for token in range(100, 108):
        digest.update(model.decode(cache, token).astype("<f4").tobytes())
    return digest.hexdigest()


def stored() -> dict[str, str]:
    return json.loads((GOLDEN / "demo_bits.json").read_text())


@pytest.mark.parametrize("isa", available_isas())
def test_this_machine_reproduces_the_stored_bits(isa: str) -> None:
    print(f"instruction set {isa}, forced; this machine has {', '.join(available_isas())}")
    program = (
        "import json, test_identity as t\n"
        "print(json.dumps({f'{d} {k}': t.demo_bits(d, 2, k) for d in t.DTYPES for k in ('f32', 'f16')}))"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"QWEN_RS_ISA": isa, "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == stored()


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 3e-37, 1e-36, 1e-35, 1e25])
def test_tiny_and_huge_activations_give_the_same_bits(
    scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127 / largest of a quant block overflows below 3.7e-37; a final norm's weight brings it there."""
    config = checkpoints.config()
    tensors = checkpoints.weights(config)
    tensors["model.norm.weight"] = np.full(config["hidden_size"], scale, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors, "F32")
    for dtype in DTYPES:
        logits = {}
        for isa in available_isas():
            monkeypatch.setenv("QWEN_RS_ISA", isa)
            model = Model.load(tmp_path, dtype=dtype)
            assert model.isa == isa
            logits[isa] = model.prefill(model.new_cache(), [5, 200, 33], all_logits=True).tobytes()
        assert len(set(logits.values())) == 1, f"{dtype}: {', '.join(logits)} differ"


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_stored_bits(threads: int) -> None:
    assert demo_bits("q8_0", threads, "f32") == stored()["q8_0 f32"]


def test_the_scalar_backend_gives_the_stored_bits() -> None:
    assert demo_bits("q8_0", 1, "f16", "scalar") == stored()["q8_0 f16"]


@pytest.mark.parametrize("kv", ["basic", "paged", "concat"])
def test_a_list_of_prompts_gives_what_each_gives_alone(kv: str) -> None:
    llm = LLM("demo", kv=kv)
    text = "Mr. Knightley, a sensible man about seven or eight-and-thirty, was not only a very old"
    ids = llm.tokenizer.encode(text)
    prompts = [ids[:n] for n in range(1, len(ids))] + [[5], ids[3:]]
    for params in (
        SamplingParams(max_tokens=12, temperature=0),
        SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.9, seed=3, repetition_penalty=1.1),
    ):
        together = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params) for prompt in prompts]
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]
        assert [o.text for o in together] == [o.text for o in alone]


def test_prompts_that_begin_alike_share_the_beginning_in_a_paged_cache() -> None:
    llm = LLM("demo", kv="paged")
    common = (llm.tokenizer.encode("Emma Woodhouse, handsome, clever, and rich ") * 20)[:100]
    prompts = [[*common, i] for i in (10, 20, 30)]
    params = SamplingParams(max_tokens=8, temperature=0)
    outputs = llm.generate(prompts, params)
    # The first computes the block that all begin with; what ended sequences left is found token by token.
    assert [o.metrics.cached_tokens for o in outputs] == [0, BLOCK_ROWS, BLOCK_ROWS]
    again = llm.generate(prompts, params)
    assert [o.metrics.cached_tokens for o in again] == [len(common)] * 3
    basic = LLM("demo")
    expected = [basic.generate(p, params).token_ids for p in prompts]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in again] == expected


def test_snapshot_goes_on_in_a_new_cache() -> None:
    model = Model.load(DEMO)
    cache = model.new_cache()
    model.prefill(cache, list(range(50)))
    other = model.new_cache("concat", kv_dtype="f32")
    model.restore(other, model.snapshot(cache))
    assert np.array_equal(model.decode(cache, 7), model.decode(other, 7))


if __name__ == "__main__":  # store the bits: python tests/python/test_identity.py
    bits = {f"{d} {k}": demo_bits(d, 2, k) for d in DTYPES for k in ("f32", "f16")}
    (GOLDEN / "demo_bits.json").write_text(json.dumps(bits, indent=1) + "\n")
