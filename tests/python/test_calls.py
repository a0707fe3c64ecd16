"""What a call means: stop strings and stop tokens, settings, prompts, the context, seeds."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_rs import LLM, ModelError, Output, SamplingParams, load_snapshot, save_snapshot
from qwen_rs.engine.options import BLOCK_ROWS
from qwen_rs.engine.sampling_params import choice_seed
from qwen_rs.engine.stop_strings import StopStrings

FREE = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}

# --- Stop strings: the earliest, the longest of those, however the text is cut. ---

SPECIAL = "<X>"


def first_stop(parts: list[tuple[str, bool]], stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that string, by looking at the whole text.

    ``parts`` are ``(text, is it a special token)``. A string in which a special token is written out is
    looked for in the text with special tokens, another one in the text without. A special token that is
    a stop string itself ends the text.
    """
    if SPECIAL in stops and (SPECIAL, True) in parts:
        parts = parts[: parts.index((SPECIAL, True)) + 1]
    shown = [not special for text, special in parts for _ in text]
    full = "".join(text for text, _ in parts)
    places = [i for i, visible in enumerate(shown) if visible]
    visible = "".join(full[i] for i in places)
    found = []
    for stop in stops:
        if SPECIAL in stop and stop in full:
            found.append((full.index(stop), -len(stop), stop))
        elif SPECIAL not in stop and stop in visible:
            found.append((places[visible.index(stop)], -len(stop), stop))
    if not found:
        return visible, None
    at, _, stop = min(found)
    return "".join(full[i] for i in places if i < at), stop


@settings(max_examples=1000, deadline=None)
@given(
    parts=st.lists(st.one_of(st.text("ab", min_size=1, max_size=6), st.just(SPECIAL)), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    special_stops=st.lists(st.tuples(st.text("ab", max_size=2), st.text("ab", max_size=2)), max_size=2),
    spelled=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
def test_the_stop_string_found_does_not_depend_on_the_cuts(
    parts: list[str], stops: list[str], special_stops: list[tuple[str, str]], spelled: bool, cuts: list[int]
) -> None:
    """``spelled``: the letters of a special token come as ordinary text, which shows."""
    stops = stops + [before + SPECIAL + after for before, after in special_stops]
    marked = [(text, text == SPECIAL and not spelled) for text in parts]
    finder, out, found = StopStrings(stops, {SPECIAL}), "", None
    for text, special in marked:
        edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
        pieces = [("", text)] if special else [(text[a:b], "") for a, b in pairwise(edges)]
        for piece in pieces:
            free, found = finder.push(*piece)
            out += free
            if found is not None:
                break
        if found is not None:
            break
    else:
        free, found = finder.flush()
        out += free
    assert (out, found) == first_stop(marked, stops)


def test_a_longer_stop_string_wins_over_its_beginning(demo: LLM) -> None:
    text = demo.generate("Emma", SamplingParams(**FREE)).text
    long, short = text[8:20], text[8:10]
    assert text.index(short) == 8 or text.index(long) == text.index(short)
    for stops in ([short, long], [long, short], [text[12:14], long, short]):
        output = demo.generate("Emma", SamplingParams(**FREE, stop=stops))
        assert (output.text, output.stop_reason) == (text[: text.index(long)], long)
    # The longer one never comes: the shorter one it is, at the end of the text too.
    for stops in ([short, short + "\N{SNOWMAN}"], [text[-2:], text[-2:] + "\N{SNOWMAN}"]):
        output = demo.generate("Emma", SamplingParams(**FREE, stop=stops))
        assert (output.text, output.stop_reason) == (text[: text.index(stops[0])], stops[0])


# --- Special tokens as stop strings, and stop_token_ids. ---


def with_special(directory: Path, token: int) -> LLM:
    """The demo, of whose tokens one more is special: its text is left out of what is decoded."""
    copy = Path(shutil.copytree(DEMO, directory))
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    name = next(name for name, i in tokenizer["model"]["vocab"].items() if i == token)
    added = tokenizer["added_tokens"]
    added.append(added[0] | {"id": token, "content": name, "special": True})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return LLM(copy)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory, demo: LLM) -> tuple[LLM, int, str]:
    """A model that generates a special token, its id and its text."""
    ids = demo.generate("Emma", SamplingParams(**FREE)).token_ids
    token = next(i for i in ids[5:] if ids.index(i) >= 5)  # not among the first
    llm = with_special(tmp_path_factory.mktemp("special") / "m", token)
    name = llm.tokenizer.decode([token], skip_special_tokens=False)
    output = llm.generate("Emma", SamplingParams(**FREE))
    assert output.token_ids == ids and name not in output.text
    return llm, token, name


def test_a_stop_string_that_is_a_special_token_ends_the_text(special: tuple[LLM, int, str]) -> None:
    llm, token, name = special
    free = llm.generate("Emma", SamplingParams(**FREE))
    before = free.token_ids[: free.token_ids.index(token)]
    text = llm.tokenizer.decode(before)
    for stop, expected in (
        (name, text),
        ([text[-3:] + name], text[:-3]),  # it may be a part of one
        (["\N{SNOWMAN}", text[-1:] + name, name], text[:-1]),
    ):
        params = SamplingParams(**FREE, stop=stop)
        alone = llm.generate("Emma", params)
        assert alone.text == expected and alone.finish_reason == "stop"
        assert alone.stop_reason in ([stop] if isinstance(stop, str) else stop)
        assert alone.token_ids == [*before, token]
        pieces = list(llm.stream("Emma", params))
        assert "".join(piece.text for piece in pieces) == expected
        assert pieces[-1].finish_reason == "stop"
        for output in llm.generate(["Emma", "Emma", "Mr. Darcy"], params)[:2]:
            assert (output.text, output.stop_reason) == (expected, alone.stop_reason)
    # Text that a special token parts is one text: what is left out of it hides no stop string.
    after = llm.tokenizer.decode(free.token_ids)[len(text) :]
    joined = text[-2:] + after[:2]
    output = llm.generate("Emma", SamplingParams(**FREE, stop=joined))
    assert output.stop_reason == joined and output.text == free.text[: free.text.index(joined)]


def test_stop_token_ids_end_the_text(demo: LLM, special: tuple[LLM, int, str]) -> None:
    for llm, token in ((demo, None), (special[0], special[1])):
        free = llm.generate("Emma", SamplingParams(**FREE)).token_ids
        token = free[7] if token is None else token
        at = free.index(token)
        for ids in ([token], iter([4000, token]), {token}, (free[-1], token), np.array([token])):
            params = SamplingParams(**FREE, stop_token_ids=ids)
            output = llm.generate("Emma", params)
            at = min(free.index(i) for i in params.stop_token_ids if i in free)
            assert output.token_ids == free[: at + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", free[at])
            assert output.text == llm.tokenizer.decode(free[:at])
            assert "".join(piece.text for piece in llm.stream("Emma", params)) == output.text
            assert llm.generate(["Mr. Darcy", "Emma"], params)[1].text == output.text
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    for wrong in ([-1], [1.5], ["x"], [True], 5, "12", b"ab", [10**23], {token: 1}):
        with pytest.raises(ValueError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop_token_ids: token id 4096 is outside"):
        demo.generate("Emma", SamplingParams(stop_token_ids=[1, 4096]))


# --- SamplingParams: every setting is judged when it is made, None is the default, numpy is welcome. ---

SETTINGS = [field.name for field in fields(SamplingParams)]
REALS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
WHOLES = ["max_tokens", "top_k", "seed", "logprobs", "n"]
HUGE = [10**23, -(10**23), 10**400, 10**5000, float("inf"), float("-inf"), float("nan"), 1e39, -1e39]


def test_none_is_the_default_of_every_setting(demo: LLM) -> None:
    params = SamplingParams(**dict.fromkeys(SETTINGS))
    assert params == replace(SamplingParams(), max_tokens=None)
    assert demo.generate(list(range(2030)), replace(params, seed=1)).token_ids
    output = demo.generate(list(range(100, 140)), replace(params, temperature=0, ignore_eos=True))
    assert output.finish_reason == "length"  # no max_tokens: until the context ends
    assert len(output.prompt_token_ids) + len(output.token_ids) == demo.max_context


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_setting_cannot_be_is_said_when_it_is_made(name: str) -> None:
    wrong: list[object] = ["", "x", b"x", object(), [1.5], 1j, np.array([1.0, 2.0])]
    wrong += [{1: 101}, {1: "x"}, {-1: 1}, {1.5: 1}, {1: float("nan")}] if name == "logit_bias" else [{}]
    if name not in ("stop", "ignore_eos"):
        wrong += [True, np.bool_(False)]
    if name in WHOLES:
        wrong += [1.5, np.float32(1), *HUGE]
    elif name in REALS:
        large = ("temperature", "repetition_penalty")  # 1e23 is a large one, but one
        wrong += [value for value in HUGE if name not in large or value != 10**23]
    elif name != "ignore_eos":  # stop strings or tokens: not one of another kind, and none that is empty
        wrong += [5, [""], [None], ["x", 5] if name == "stop" else ["x"]]
    for value in wrong:
        if isinstance(value, str) and (name, value) == ("stop", "x"):
            continue
        with pytest.raises(ValueError, match=rf"^{name}\b"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", WHOLES + REALS)
def test_numpy_numbers_are_numbers(name: str, demo: LLM) -> None:
    forms = [int, np.int64, np.uint8, np.int16] + [float, np.float16, np.float32, np.float64] * (
        name in REALS
    )
    made = {SamplingParams(**{name: form(1)}) for form in forms}
    assert len(made) == 1
    value = getattr(made.pop(), name)
    assert type(value) is (float if name in REALS else int) and value == 1


def test_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize("form", [iter, list, tuple, set, lambda stops: (s for s in stops), np.array])
def test_stop_strings_may_come_in_any_iterable(demo: LLM, form: Callable[[list[str]], Any]) -> None:
    text = demo.generate("Emma", SamplingParams(**FREE)).text
    params = SamplingParams(**FREE, stop=form([text[5:9], "\N{SNOWMAN}"]))
    for _ in range(2):  # an iterator is read once, when the parameters are made
        assert demo.generate("Emma", params).text == text[: text.index(text[5:9])]


# --- generation_config.json: only what is used is judged, and the message has the path. ---

BAD = {
    "temperature": ["hot", -1, True, 1e39, [1]],
    "top_k": [-2, 1.5, "50", 10**23],
    "top_p": [0.0, 1.5, "most"],
    "min_p": [-0.1, "x", {}],
    "repetition_penalty": [0, "x", float("inf")],
    "do_sample": ["yes", 2],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_in_generation_config_fails_only_calls_that_use_it(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(DEMO, tmp_path / "m"))
    path = copy / "generation_config.json"
    good = json.loads(path.read_text())
    for value in BAD[name]:
        path.write_text(json.dumps(good | {name: value}))
        llm = LLM(copy, threads=1)
        with pytest.raises(ModelError, match=rf"^{re.escape(str(path))}: {name} must be"):
            llm.generate("Emma", SamplingParams(max_tokens=2))
        own: dict[str, Any] = {"temperature": 0.5} if name == "do_sample" else {name: 1}
        assert llm.generate("Emma", SamplingParams(max_tokens=2, **own)).token_ids
        if name != "repetition_penalty":  # a greedy choice reads none of the others
            assert llm.generate("Emma", SamplingParams(max_tokens=2, temperature=0)).token_ids


def test_top_k_of_minus_one_in_generation_config_is_off() -> None:
    config = {"do_sample": True, "top_k": -1}
    assert SamplingParams().resolved(config).top_k == 0


# --- What counts as a prompt. ---

ANYTHING_ELSE = [
    {}, {"prompt": "Emma"}, {"Emma": 1}.keys(), {5: 6}.keys(), {5: 6}.values(), {5, 6}, frozenset("x"),
    b"", b"Emma", bytearray(b"Emma"), memoryview(b"Emma"), None, 5, 1.5, True, object(), iter(["Emma"]),
    np.int64(5), np.array(5),
]  # fmt: skip
NO_IDS = [
    "", [], (), range(0), np.array([], int), np.array([]), [1.5], [5, "x"], [True], [5, None], [[5]], [-1],
    [4096], [2**70], ["x"], [b"x"], np.array([1.5]), np.array([True]), np.array([[5]]),
]  # fmt: skip


@pytest.mark.parametrize("wrong", ANYTHING_ELSE, ids=repr)
def test_what_is_no_prompt_is_a_value_error_everywhere(demo: LLM, wrong: Any) -> None:
    calls = [demo.generate, demo.stream, lambda x: demo.generate(["Emma", x])]
    if not isinstance(wrong, int | float | np.int64):  # [5] is a prompt
        calls.append(lambda x: demo.generate([x]))
    for call in calls:
        with pytest.raises(ValueError, match="prompt"):
            call(wrong)


@pytest.mark.parametrize("wrong", NO_IDS, ids=repr)
def test_a_prompt_of_no_tokens_or_of_something_else_is_a_value_error(demo: LLM, wrong: Any) -> None:
    for call in (demo.stream, lambda x: demo.generate([x]), lambda x: demo.generate(["Emma", x])):
        with pytest.raises(ValueError, match=r"prompt|token id"):
            call(wrong)


def test_lists_of_prompts(demo: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    alone = [demo.generate(prompt, params).token_ids for prompt in ("Emma", [5, 6])]
    for prompts in (["Emma", [5, 6]], ("Emma", (5, 6)), ["Emma", np.array([5, 6])], ["Emma", range(5, 7)]):
        assert [o.token_ids for o in demo.generate(prompts, params)] == alone  # type: ignore[call-overload]
    for empty in ([], (), np.array([], dtype=str), np.empty((0, 3), int)):
        assert demo.generate(empty) == []  # no prompts
    for empty_prompt in (np.array([], int), np.array([]), [[]], [()], [""]):
        with pytest.raises(ValueError, match="the prompt is empty"):
            demo.generate(empty_prompt)  # type: ignore[call-overload]
    numbers = np.array([[5, 6], [5, 6]])
    assert [o.token_ids for o in demo.generate(numbers, params)] == [alone[1]] * 2  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "wrong", [{}, {"max_tokens": 3}, 0, 5, "", "greedy", False, b"", (x for x in ()), object()]
)
def test_params_of_another_kind_are_a_type_error(demo: LLM, wrong: Any) -> None:
    for call in (demo.generate, demo.stream, demo.start):
        with pytest.raises(TypeError, match="params must be SamplingParams"):
            call("Emma", wrong)
    for prompts in ([], ["Emma"], ["Emma", "Emma"]):
        with pytest.raises(TypeError, match="params must be SamplingParams"):
            demo.generate(prompts, wrong)
        with pytest.raises((TypeError, ValueError), match="params"):
            demo.generate(prompts, [wrong] * len(prompts) or [wrong])


def test_an_empty_model_name_is_not_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO)
    with pytest.raises(ValueError, match="model"):
        LLM("")
    assert LLM(".").max_context == 2048


@pytest.mark.parametrize("name", ["threads", "max_context"])
def test_sizes_of_an_llm_are_whole_numbers(name: str) -> None:
    for wrong in (0, -1, 1.5, True, "1", 10**23, np.float32(1)):
        with pytest.raises(ValueError, match=name):
            LLM("demo", **{name: wrong})
    assert LLM("demo", **{name: np.int64(2)}).model.threads
    for option in ("dtype", "kv", "kv_dtype", "backend"):
        for value in ("f8", "", None, 3, ["f32"]):
            with pytest.raises(ValueError, match=f"^{option} must be"):
                LLM("demo", **{option: value})


def test_a_block_of_the_cores_pools_has_as_many_rows(demo: LLM) -> None:
    assert demo.model.new_pool(1).block_rows == BLOCK_ROWS


# --- The context holds the prompt and the output. ---


@pytest.mark.parametrize("kv", ["basic", "paged", "concat"])
def test_prompt_and_output_fit_the_context(kv: str) -> None:
    llm = LLM("demo", kv=kv, max_context=10)
    endless = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    for length in range(1, 10):
        ids = list(range(5, 5 + length))
        for output in (llm.generate(ids, endless), *llm.generate([ids, [9] * length], endless)):
            assert len(output.prompt_token_ids) + len(output.token_ids) == 10
            assert output.finish_reason == "length"
        assert sum(len(piece.token_ids) for piece in llm.stream(ids, endless)) == 10 - length
    for length in (10, 11, 3000):
        with pytest.raises(ValueError, match=f"{length} tokens .* context of 10"):
            llm.generate([5] * length)


def test_the_models_own_context_can_be_filled() -> None:
    llm = LLM("demo")
    endless = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    output = llm.generate([5] * 2040, endless)
    assert len(output.token_ids) == 8 and output.finish_reason == "length"
    # The core itself takes a prompt of the whole context: its logits are wanted, not another token.
    assert llm.model.prefill(llm.model.new_cache(), [5] * 2048).shape == (1, 4096)


# --- Each sequence draws for itself; with a seed its draws are fixed. ---

SAMPLED = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True}


@pytest.mark.parametrize("kv", ["basic", "paged"])
def test_without_a_seed_each_sequence_draws_its_own(kv: str) -> None:
    llm = LLM("demo", kv=kv)
    outputs = llm.generate(["Emma"] * 20, SamplingParams(**SAMPLED))  # more than are decoded together
    choices = llm.generate("Emma", SamplingParams(**SAMPLED, n=20))
    again = llm.generate("Emma", SamplingParams(**SAMPLED))
    everyone = [*outputs, *choices, again]  # type: ignore[misc]
    assert len({tuple(o.token_ids) for o in everyone}) == 41
    assert len({o.metrics.seed for o in everyone}) == 41
    for output in everyone[::10]:  # and each can be had again
        alone = llm.generate("Emma", SamplingParams(**SAMPLED, seed=output.metrics.seed))
        assert alone.token_ids == output.token_ids


def test_with_a_seed_a_prompt_of_a_list_gives_what_it_gives_alone(demo: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=3)
    alone = demo.generate("Emma", params)
    assert alone.metrics.seed == 3
    together = demo.generate(["Emma", "Mr. Darcy", "Emma"], params)
    assert together[0].token_ids == together[2].token_ids == alone.token_ids


def test_choices_are_the_first_ones_own_and_streams_of_the_seed(demo: LLM) -> None:
    alone = demo.generate("Emma", SamplingParams(**SAMPLED, seed=3))
    choices: Any = demo.generate("Emma", SamplingParams(**SAMPLED, seed=3, n=18))
    assert [o.metrics.seed for o in choices] == [choice_seed(3, i) for i in range(18)]
    assert choices[0].token_ids == alone.token_ids
    assert len({tuple(o.token_ids) for o in choices}) == 18
    fewer: Any = demo.generate(["Mr. Darcy", "Emma"], SamplingParams(**SAMPLED, seed=3, n=2))
    assert [len(several) for several in fewer] == [2, 2]
    assert [o.token_ids for o in fewer[1]] == [o.token_ids for o in choices[:2]]
    # Written down here, so that they stay: SHA-256 of seed and choice, 8 bytes each, little-endian.
    assert [choice_seed(3, i) for i in range(3)] == [3, 12990599282712802971, 11181645376746785971]
    assert choice_seed(2**64 - 1, 1) < 2**64 and choice_seed(2**64 - 1, 0) == 2**64 - 1
    for call in (demo.stream, demo.start):
        with pytest.raises(ValueError, match="n must be 1"):
            call("Emma", SamplingParams(n=2))


def test_params_may_be_a_list_one_for_each_prompt(demo: LLM) -> None:
    each = [
        SamplingParams(**SAMPLED, seed=1),
        SamplingParams(max_tokens=3, temperature=0),
        SamplingParams(**FREE, stop="e"),
    ]
    outputs = demo.generate(["Emma"] * 3, each)
    assert outputs == [
        replace(o, metrics=mine.metrics) for o, mine in zip(alone(demo, each), outputs, strict=True)
    ]
    mixed: Any = demo.generate(["Emma"] * 3, (each[0], replace(each[0], n=2), each[1]))
    assert [isinstance(o, list) for o in mixed] == [False, True, False]
    assert mixed[0].token_ids == mixed[1][0].token_ids
    assert demo.generate("Emma", each[:1]).token_ids == outputs[0].token_ids
    assert demo.generate([], []) == []
    for prompts, count in (("Emma", 0), ("Emma", 2), (["Emma"], 0), (["Emma"] * 2, 3), ([], 1)):
        with pytest.raises(ValueError, match=f"{count} params for"):
            demo.generate(prompts, [SamplingParams()] * count)  # type: ignore[call-overload]


def alone(llm: LLM, each: list[SamplingParams]) -> list[Output]:
    return [llm.generate("Emma", params) for params in each]


# --- Snapshot files of other dtypes. ---


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, "BF16"),
        (2, "F16"),
        (1, "F8_E4M3"),
        (1, "F8_E5M2"),
        (1, "F8_E8M0"),
        (8, "F64"),
        (4, "I32"),
        (1, "U8"),
        (1, "BOOL"),
    ],
)
@pytest.mark.parametrize("which", ["layers.0.k", "layers.3.v"])
def test_a_snapshot_of_another_dtype_is_a_model_error(
    demo: LLM, tmp_path: Path, dtype: str, size: int, which: str
) -> None:
    model, cache, path = demo.model, demo.model.new_cache(), tmp_path / "s"
    model.prefill(cache, [1, 2, 3])
    save_snapshot(path, model, cache)
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    head = json.loads(data[8 : 8 + length])
    body, start = b"", 0
    for name in sorted(head.keys() - {"__metadata__"}, key=lambda name: head[name]["data_offsets"][0]):
        count = 4
        if name == which:
            head[name]["dtype"], count = dtype, size
        rows, width = head[name]["shape"]
        part = bytes(rows * width * count)
        head[name]["data_offsets"], start = [start, start + len(part)], start + len(part)
        body += part
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    fresh = model.new_cache()
    with pytest.raises(ModelError, match=rf"^{re.escape(str(path))}: {which} is {dtype}, not F32"):
        load_snapshot(path, model, fresh)
    assert fresh.seq_len == 0


# --- Systems without the resource module. ---


def test_the_package_imports_and_counts_without_the_resource_module() -> None:
    program = """
import sys
sys.modules["resource"] = None  # as on Windows: importing it is an ImportError
from pathlib import Path
Path.exists = lambda self: False  # no /proc either
import qwen_rs, qwen_rs.cli, qwen_rs.bench
from qwen_rs.engine.metrics import peak_rss_bytes
print(peak_rss_bytes())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "None\n", result.stderr
