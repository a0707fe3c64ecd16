"""The generation loop: streaming, stopping, sampling, chat, signals."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import DEMO, GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_rs import LLM, CacheError, ChatTemplate, Model, Sampler, SamplingParams
from qwen_rs.checkpoint.reasoning import split_reasoning
from qwen_rs.checkpoint.tokenizer import StreamDecoder, Tokenizer

TEXT = "naïve café — “你好，世界” 👩‍👩‍👧‍👦 🏳️‍🌈 ﬁn\N{REPLACEMENT CHARACTER} e\u0301 \U0001f600x"  # noqa: RUF001 (as it is meant)


def test_streamed_pieces_are_whole_characters_and_join_to_the_text(demo: LLM) -> None:
    ids = demo.tokenizer.encode(TEXT)
    decoder = StreamDecoder(demo.tokenizer)
    pieces = [decoder.push(i) for i in ids] + [decoder.flush()]
    assert "".join(pieces) == demo.tokenizer.decode(ids)
    assert sum("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces) == 1  # the one in the text
    assert decoder.flush() == ""


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 4095), max_size=40))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    tokenizer = TOKENIZER
    decoder = StreamDecoder(tokenizer)
    assert "".join([*(decoder.push(i) for i in ids), decoder.flush()]) == tokenizer.decode(ids)


TOKENIZER = Tokenizer(DEMO)


def test_stream_gives_what_generate_gives(demo: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=11)
    output = demo.generate("Mrs. Bennet", params)
    pieces = list(demo.stream("Mrs. Bennet", params))
    assert "".join(p.text for p in pieces) == output.text
    assert [i for p in pieces for i in p.token_ids] == output.token_ids
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(output.metrics.forward_ms) == len(output.token_ids) == 60


def test_every_end_of_sequence_id_ends_the_sequence(tmp_path: Path) -> None:
    first = LLM("demo").generate("Emma", SamplingParams(max_tokens=3, temperature=0)).token_ids
    for value, expected in ((first[1], 2), ([4000, first[1]], 2), ([first[2], first[0]], 1), ([], 3)):
        copy = Path(shutil.copytree(DEMO, tmp_path / f"m{expected}{value}"))
        config = json.loads((copy / "generation_config.json").read_text())
        (copy / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": value}))
        llm = LLM(copy)
        output = llm.generate("Emma", SamplingParams(max_tokens=3, temperature=0))
        assert output.token_ids == first[:expected]
        assert output.finish_reason == ("length" if expected == 3 else "stop")
        if expected < 3:
            assert output.stop_reason == first[expected - 1]
            assert output.text == llm.tokenizer.decode(first[: expected - 1])
            ignored = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            assert llm.generate("Emma", ignored).token_ids == first


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_of_sequence_ids_come_from_the_next_file_if_one_has_none(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(DEMO, tmp_path / "m"))
    for file in ("generation_config.json", "config.json"):
        config = json.loads((copy / file).read_text())
        del config["eos_token_id"]
        (copy / file).write_text(json.dumps(config))
    if name == "config.json":
        config = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(config | {"eos_token_id": 77}))
    tokenizer_says = LLM("demo").tokenizer.token_id("<|endoftext|>")
    assert LLM(copy).eos_token_ids == {77 if name == "config.json" else tokenizer_says}


def test_generation_config_decides_unless_told_otherwise() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    p = SamplingParams().resolved(config)
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (0.6, 20, 0.95, 0.0, 1.0)
    assert SamplingParams(temperature=0).resolved(config).temperature == 0
    assert SamplingParams(top_k=5).resolved(config).top_k == 5
    assert SamplingParams().resolved({}).temperature == 0  # transformers' default is greedy
    assert SamplingParams().resolved({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingParams(top_p=0.5).resolved({}).temperature == 1  # asked to sample
    assert SamplingParams(seed=3).resolved({}).seed == 3
    assert SamplingParams().resolved({}).seed != SamplingParams().resolved({}).seed


def reference_probabilities(logits: np.ndarray, t: float, k: int, p: float, m: float) -> np.ndarray:
    """The warpers of transformers, in their order, in f64."""
    x = logits.astype(np.float64) / t
    order = np.argsort(-x, kind="stable")
    if k:
        x[order[k:]] = -np.inf
    q = np.exp(x - x.max())
    q /= q.sum()
    if p < 1:
        cumulative = np.cumsum(q[order])
        x[order[1:][cumulative[:-1] >= p]] = -np.inf
    q = np.exp(x - x.max())
    q[q < m] = 0
    return q / q.sum()


@pytest.mark.parametrize(
    ("t", "k", "p", "m"),
    [(1, 0, 1, 0), (0.7, 5, 1, 0), (1.5, 0, 0.8, 0), (1, 0, 1, 0.2), (0.9, 20, 0.9, 0.05), (1, 0, 0.01, 0)],
)
def test_sampling_frequencies_are_those_of_the_distribution(t: float, k: int, p: float, m: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(300) * 2).astype(np.float32)
    expected = reference_probabilities(logits, t, k, p, m)
    sampler = Sampler(temperature=t, top_k=k, top_p=p, min_p=m, seed=1)
    draws = 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=300)
    assert not counts[expected == 0].any()
    deviation = np.abs(counts / draws - expected)
    assert (deviation <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-9).all()


def test_penalties() -> None:
    logits = np.array([2.0, 1.9, -1.0, 1.5], dtype=np.float32)
    assert Sampler(temperature=0).sample(logits) == 0
    assert Sampler(temperature=0, repetition_penalty=1.2, prompt=[0, 0, 2]).sample(logits) == 1
    sampler = Sampler(temperature=0, presence_penalty=0.2)
    assert [sampler.sample(logits) for _ in range(3)] == [0, 1, 0]
    sampler = Sampler(temperature=0, frequency_penalty=0.3)
    assert [sampler.sample(logits) for _ in range(5)] == [0, 1, 0, 1, 3]


def test_chat_templates_render_as_transformers_renders_them(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(DEMO, tmp_path / "m"))
    source = (GOLDEN / "chat" / "chat_template.jinja").read_text(encoding="utf-8")
    cases = json.loads((GOLDEN / "chat" / "rendered.json").read_text(encoding="utf-8"))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    for where in ("jinja", "string", "list"):
        (copy / "chat_template.jinja").unlink(missing_ok=True)
        if where == "jinja":
            (copy / "chat_template.jinja").write_text(source, encoding="utf-8")
        else:
            named = [{"name": "rag", "template": "no"}, {"name": "default", "template": source}]
            template = source if where == "string" else named
            (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        template = ChatTemplate.of(copy, Tokenizer(copy))
        assert template is not None
        for case in cases:
            assert template.render(case["messages"], **case["options"]) == case["text"]
    with pytest.raises(ValueError, match="unknown role judge"):
        template.render([{"role": "judge", "content": "x"}])


def test_reasoning_is_told_apart() -> None:
    assert split_reasoning("<think>\nhm\n</think>\n\nYes.") == ("hm", "Yes.")
    assert split_reasoning("hm\n</think>\n\nYes.", opened=True) == ("hm", "Yes.")
    assert split_reasoning("<think>\nhm, the budget") == ("hm, the budget", "")
    assert split_reasoning("Yes.") == (None, "Yes.")


@pytest.mark.parametrize("prompt", ["", [], [-1], [4096], [2**70], ["x"], list(range(2048))])
def test_bad_prompts_are_value_errors(demo: LLM, prompt: object) -> None:
    with pytest.raises(ValueError):
        demo.generate([prompt])  # type: ignore[list-item]


def test_core_refuses_what_does_not_fit(demo: LLM) -> None:
    model = demo.model
    cache = model.new_cache()
    for tokens in ([], [4096], [-1], [2**40], [1] * 2049):
        with pytest.raises(ValueError):
            model.prefill(cache, tokens)
    assert cache.seq_len == 0
    model.prefill(cache, [1, 2, 3])
    with pytest.raises(CacheError, match="given twice"):
        model.decode_batch([cache, cache], [1, 2])
    with pytest.raises(ValueError, match="2 tokens for 1 caches"):
        model.decode_batch([cache], [1, 2])
    with pytest.raises(ValueError, match="basic cache cannot share"):
        cache.fork()
    other = Model.load(GOLDEN / "gqa_4_1")
    with pytest.raises(ValueError, match="another shape"):
        other.decode(cache, 1)
    assert cache.seq_len == 3


def test_the_context_ends_a_generation() -> None:
    llm = LLM("demo", max_context=32)
    output = llm.generate(
        list(range(100, 130)), SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    )
    assert output.finish_reason == "length" and len(output.token_ids) == 2


def test_a_closed_llm_says_so() -> None:
    llm = LLM("demo")
    llm.close()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate("x")


def test_other_threads_run_while_the_core_works(demo: LLM) -> None:
    """The GIL is released: a thread that sleeps and counts keeps its pace during prefill and load."""
    for work in (
        lambda: demo.model.prefill(demo.model.new_cache(), [1] * 2000, all_logits=True),
        lambda: [Model.load(DEMO) for _ in range(10)],
    ):
        ticks, done = [], threading.Event()

        def count(ticks: list[float] = ticks, done: threading.Event = done) -> None:
            while not done.wait(0.001):
                ticks.append(time.perf_counter())

        thread = threading.Thread(target=count)
        thread.start()
        started = time.perf_counter()
        work()
        ended = time.perf_counter()
        done.set()
        thread.join()
        during = [t for t in ticks if started < t < ended]
        # Held, the GIL would let through none but at the two ends.
        assert len(during) >= 5
