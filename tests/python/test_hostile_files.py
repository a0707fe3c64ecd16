"""Files from anyone: each broken one gets one error, soon, and never takes the process down.

Mutations are drawn by hypothesis from a small real checkpoint; ``tests/golden/hostile`` keeps those that
are worth keeping, by the name of the file that they replace.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DEMO, GOLDEN, report
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qwen_rs import LLM, ChatTemplate, Model, ModelError, SamplingParams, load_snapshot, save_snapshot

SOURCE = GOLDEN / "gqa_4_1"
SECONDS = 1.0
"""What one broken file may take."""
ERRORS = (ModelError, OSError)
fuzz = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
tried = {"files": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with a tokenizer, to be broken one file at a time."""
    directory = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(SOURCE, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def tell() -> Any:
    yield
    report(f"{tried['files']} hostile files and templates tried: each one error, or a model")


def load(directory: Path) -> LLM | None:
    """The model, if it still is one, or None for an error of the right kind, soon."""
    tried["files"] += 1
    started = time.perf_counter()
    try:
        llm = LLM(directory, threads=1)
        llm.generate([1, 2], SamplingParams(max_tokens=2))
        return llm
    except ERRORS as error:
        assert "\n" not in str(error).strip(), error
        return None
    except ValueError as error:  # only for the prompt: a vocabulary or a context too small for it
        assert "vocabulary" in str(error) or "context" in str(error), error
        return llm
    finally:
        # Far above what it takes: a hang is what it finds.
        assert time.perf_counter() - started < 10 * SECONDS


def with_file(directory: Path, name: str, content: bytes, check: Callable[[Path], object] = load) -> object:
    path = directory / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    try:
        return check(directory)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.sampled_from([2**31, 2**32 - 1, 2**53, 2**63, 2**64, -(2**63), 10**9, 10**40]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 5), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
CONFIG = json.loads((SOURCE / "config.json").read_text())


@fuzz
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), ODD, min_size=1, max_size=3))
@example(changes={"num_attention_heads": 0})
@example(changes={"num_key_value_heads": 3})
@example(changes={"num_hidden_layers": 10**9})
@example(changes={"max_position_embeddings": 1})
@example(changes={"eos_token_id": [2**64]})
@example(changes={"rms_norm_eps": float("nan")})
def test_any_config(checkpoint: Path, changes: dict[str, object]) -> None:
    with_file(checkpoint, "config.json", json.dumps(CONFIG | changes).encode())


@fuzz
@given(
    name=st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json"]), data=st.data()
)
def test_any_bytes_for_json(checkpoint: Path, name: str, data: st.DataObject) -> None:
    nested = st.integers(1, 200_000).map(lambda n: b"[" * n)
    values = st.recursive(ODD, lambda x: st.lists(x) | st.dictionaries(st.text(max_size=9), x), max_leaves=9)
    text = values.map(lambda value: json.dumps(value).encode())
    with_file(checkpoint, name, data.draw(st.one_of(st.binary(max_size=64), nested, text)))


def header(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def whole(head: object, body: bytes, length: int | None = None) -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


WEIGHTS = (SOURCE / "model.safetensors").read_bytes()
HEADER, BODY = header(WEIGHTS)
NAMES = sorted(set(HEADER) - {"__metadata__"})
BIG = st.sampled_from([0, 1, 7, 8, 2**16, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, len(WEIGHTS), -1])


@fuzz
@given(length=BIG, cut=st.integers(0, len(WEIGHTS)), flip=st.integers(0, 4095), bits=st.integers(0, 255))
def test_any_header_length_cut_and_flipped_byte(
    checkpoint: Path, length: int, cut: int, flip: int, bits: int
) -> None:
    for data in (
        struct.pack("<q" if length < 0 else "<Q", length) + WEIGHTS[8:],
        WEIGHTS[:cut],
        WEIGHTS[:flip] + bytes([WEIGHTS[flip] ^ bits]) + WEIGHTS[flip + 1 :],
    ):
        with_file(checkpoint, "model.safetensors", data)


@fuzz
@given(
    name=st.sampled_from(NAMES),
    change=st.one_of(
        st.tuples(st.just("shape"), st.lists(BIG, max_size=4)),
        st.tuples(st.just("data_offsets"), st.lists(BIG, min_size=2, max_size=2)),
        st.tuples(st.just("dtype"), st.sampled_from(["F64", "BF16", "F16", "I8", "BOOL", "F8_E4M3", "X", 3])),
    ),
)
@example(name=NAMES[0], change=("shape", [2**63, 2**63]))
@example(name=NAMES[1], change=("data_offsets", [0, 4]))  # overlaps the first
def test_any_tensor_entry(checkpoint: Path, name: str, change: tuple[str, object]) -> None:
    changed = HEADER | {name: HEADER[name] | {change[0]: change[1]}}
    llm = with_file(checkpoint, "model.safetensors", whole(changed, BODY))
    assert llm is None or HEADER[name][change[0]] == change[1]


@pytest.mark.parametrize("gap", ["overlap", "gap", "beyond", "backwards"])
def test_offsets_that_do_not_tile_the_file(checkpoint: Path, gap: str) -> None:
    start, end = HEADER[NAMES[2]]["data_offsets"]
    wrong = {
        "overlap": [start - 4, end - 4],
        "gap": [start + 4, end + 4],
        "beyond": [len(BODY), len(BODY) + end - start],
        "backwards": [end, start],
    }[gap]
    changed = HEADER | {NAMES[2]: HEADER[NAMES[2]] | {"data_offsets": wrong}}
    assert with_file(checkpoint, "model.safetensors", whole(changed, BODY)) is None


@fuzz
@given(where=st.integers(0, len(BODY) // 2 - 1), value=st.sampled_from([0x7F80, 0xFF80, 0x7FC0, 0xFFFF]))
def test_nan_and_infinity_anywhere_in_bf16_weights(tmp_path: Path, where: int, value: int) -> None:
    source = GOLDEN / "head_dim_128_old_spelling"
    data = (source / "model.safetensors").read_bytes()
    head, body = header(data)
    if not all(entry["dtype"] == "BF16" for name, entry in head.items() if name != "__metadata__"):
        pytest.skip("not a BF16 checkpoint")
    where %= len(body) // 2
    copy = tmp_path / "model"
    shutil.copytree(source, copy, dirs_exist_ok=True)
    broken = body[: 2 * where] + struct.pack("<H", value) + body[2 * where + 2 :]
    (copy / "model.safetensors").write_bytes(whole(head, broken))
    tried["files"] += 1
    with pytest.raises(ModelError, match="NaN or infinity"):
        Model.load(copy, threads=1)


INDEX_NAMES = [
    "../model.safetensors",
    "/etc/passwd",
    "a/b",
    "",
    ".",
    "..",
    "model.safetensors\0",
    "x" * 300,
    None,
    3,
]


@fuzz
@given(
    index=st.one_of(
        ODD,
        st.fixed_dictionaries({"weight_map": ODD}),
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from(INDEX_NAMES), min_size=1).map(
            lambda weight_map: {"weight_map": weight_map}
        ),
    )
)
def test_any_index(checkpoint: Path, index: object) -> None:
    name = "model.safetensors.index.json"
    assert with_file(checkpoint, name, json.dumps(index).encode()) is None


TOKENIZER = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))


@fuzz
@given(
    path=st.sampled_from(
        [
            ("model",),
            ("added_tokens",),
            ("pre_tokenizer",),
            ("decoder",),
            ("normalizer",),
            ("post_processor",),
        ]
        + [("model", key) for key in TOKENIZER["model"]]
    ),
    value=ODD,
)
def test_any_tokenizer(checkpoint: Path, path: tuple[str, ...], value: object) -> None:
    changed = json.loads(json.dumps(TOKENIZER))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value

    def check(directory: Path) -> None:
        tried["files"] += 1
        try:
            llm = LLM(directory, threads=1)
            llm.generate("Emma — 你好 \U0001f600", SamplingParams(max_tokens=3))
        except ERRORS as error:
            assert "\n" not in str(error).strip()
        except ValueError as error:
            assert "vocabulary" in str(error) or "prompt is empty" in str(error), error

    with_file(checkpoint, "tokenizer.json", json.dumps(changed).encode(), check)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path, bytes]:
    model = Model.load(SOURCE, threads=1)
    cache = model.new_cache()
    model.prefill(cache, [1, 2, 3])
    path = tmp_path_factory.mktemp("snapshot") / "s"
    save_snapshot(path, model, cache)
    return model, path, path.read_bytes()


@fuzz
@given(data=st.data())
def test_any_snapshot(snapshot: tuple[Model, Path, bytes], data: st.DataObject) -> None:
    model, path, good = snapshot
    head, body = header(good)
    name = data.draw(st.sampled_from(sorted(head)))
    key = data.draw(st.sampled_from(["shape", "data_offsets", "dtype", "format", "model"]))
    entry = head[name] if isinstance(head[name], dict) else {}
    changed = head | {name: entry | {key: data.draw(ODD)}}
    cut = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[data.draw(st.integers(0, len(good) - len(body) - 1))] ^= data.draw(st.integers(1, 255))
    for content in (whole(changed, body), good[:cut], bytes(flipped)):
        tried["files"] += 1
        path.write_bytes(content)
        cache = model.new_cache()
        try:
            load_snapshot(path, model, cache)
        except ERRORS:
            assert cache.seq_len == 0
        else:
            assert cache.seq_len == 3
            assert np.isfinite(model.decode(cache, 1)).all()


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "loop", "nowhere"])
def test_what_is_not_a_file(tmp_path: Path, checkpoint: Path, name: str, kind: str) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "m"))
    path = copy / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": name, "nowhere": "/no/such"}[kind])
    dangling = kind in ("loop", "nowhere") and name == "chat_template.jinja"
    assert (load(copy) is None) != dangling  # a template may be missing


def test_the_stored_corpus(checkpoint: Path) -> None:
    corpus = sorted((GOLDEN / "hostile").iterdir())
    assert corpus
    for entry in corpus:
        assert with_file(checkpoint, entry.name.split("--")[0], entry.read_bytes()) is None, entry.name


TEMPLATES = sorted((GOLDEN / "hostile_templates").glob("*.jinja"))
RENDER_MEASURED = """
import json, resource, sys
from pathlib import Path
from qwen_rs import ChatTemplate, ModelError

def usage(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024

before = usage(resource.RUSAGE_SELF)
outcome = "rendered"
try:
    ChatTemplate(Path(sys.argv[1]).read_text(), {}, "here").render([{"role": "user", "content": "x"}])
except (ValueError, ModelError) as error:
    outcome = str(error)
import gc
gc.collect()  # a renderer that is let go is waited for, and so counted
after, children = usage(resource.RUSAGE_SELF), usage(resource.RUSAGE_CHILDREN)
seconds, megabytes = (now - then + child for then, now, child in zip(before, after, children))
print(json.dumps({"outcome": outcome, "seconds": seconds, "megabytes": megabytes}))
"""


def render_measured(path: Path) -> dict[str, Any]:
    """What a template leads to, in a process of its own, with the seconds of CPU time and the megabytes
    of memory that it took."""
    command = [sys.executable, "-c", RENDER_MEASURED, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=10 * SECONDS + 20)
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_hostile_template_has_a_second_and_200_megabytes(path: Path) -> None:
    tried["files"] += 1
    measured = render_measured(path)
    assert "\n" not in measured["outcome"]
    failures = "here: the chat template (refuses the messages|does not parse): ."
    assert re.match(f"rendered|{failures}", measured["outcome"])
    assert measured["megabytes"] < 200
    # A guard, far above the limit: the rest is Python's own start, and machines are slow.
    assert measured["seconds"] < 3 * SECONDS


REACHING_OUT = [
    "a-class",
    "a-class-by-filter",
    "a-class-by-item",
    "a-class-by-str.format",
    "a-class-in-a-condition",
    "a-list-changed",
    "a-message-changed",
    "an-import",
    "another-file",
    "globals-of-a-function",
]


@pytest.mark.parametrize("name", REACHING_OUT)
def test_a_template_that_reaches_out_is_refused(name: str) -> None:
    source = (GOLDEN / "hostile_templates" / f"{name}.jinja").read_text()
    with pytest.raises(ValueError, match="refuses the messages") as caught:
        ChatTemplate(source, {}, "here").render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_a_template_renders_again_after_its_renderer_was_killed() -> None:
    source = "{% if messages[0].content == 'x' %}{{ ('a' * 10 ** 7) in ('ab' * 10 ** 9) }}{% endif %}fine"
    template = ChatTemplate(source, {}, "here")
    for _ in range(2):
        with pytest.raises(ValueError, match="refuses the messages: it needs more than"):
            template.render([{"role": "user", "content": "x"}])
        assert template.render([{"role": "user", "content": "y"}]) == "fine"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_threads_and_a_forked_process_render_too() -> None:
    template = ChatTemplate("{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}", {}, "here")
    names = [str(i) for i in range(32)]

    def render(name: str) -> str:
        return template.render([{"role": "user", "content": name}])

    with ThreadPoolExecutor(4) as pool:
        busy = pool.map(render, names)
        child = os.fork()  # while a thread waits for its text
        if child == 0:
            signal.alarm(60)  # a lock that nobody lets go of would be waited for
            os._exit(0 if [render(name) for name in "ab"] == ["a", "b"] else 1)
        assert list(busy) == names
    assert os.waitpid(child, 0)[1] == 0
    assert render("after") == "after"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ " + "(" * 50_000, "{{" * 9, "x" * (2 << 20), "{% if a %}" * 2000]
)
def test_a_template_that_does_not_parse_is_refused(source: str) -> None:
    tried["files"] += 1
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, {}, "here")


def test_the_sandbox_lets_long_conversations_through() -> None:
    source = (GOLDEN / "chat" / "chat_template.jinja").read_text(encoding="utf-8")
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"turn {i} " * 50} for i in range(2001)]
    text = ChatTemplate(source, {}, "here").render(messages)
    assert "turn 0 " in text and "turn 2000 " in text
