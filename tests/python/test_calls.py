"""What a call means: stop strings and stop tokens, prompts, parameters, seeds, conversations."""

from __future__ import annotations

import json
import re
import shutil
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

from qwen_rs import LLM, ModelError, SamplingParams
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
    wrong: list[object] = ["", "x", b"x", {}, object(), [1.5], 1j, np.array([1.0, 2.0])]
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
