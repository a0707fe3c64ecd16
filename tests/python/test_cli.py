"""The command line: what it prints, where, and what bad input gets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEMO, GOLDEN
from safetensors.numpy import load_file, save_file

from qwen_rs import LLM, SamplingParams

BLOCK = re.compile(
    r"backend: (simd|scalar)\n"
    r"kv cache: (basic|paged|concat)\n"
    r"\n"
    r"metrics:\n"
    r"  time_to_first_token_ms: \d+\.\d{3}\n"
    r"  decode_tokens_per_second: (\d+\.\d{3}|n/a)\n"
    r"  per_forward_ms: min \d+\.\d{3}  max \d+\.\d{3}  mean \d+\.\d{3}  \(n=(\d+)\)\n"
)


def run(*args: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qwen_rs.cli", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_the_command_is_installed() -> None:
    command = shutil.which("qwen-rs", path=os.path.dirname(sys.executable))
    assert command is not None
    out = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert out.startswith("qwen-rs ")


def test_standard_output_has_the_text_alone_and_the_block_is_on_standard_error() -> None:
    result = run("generate", "--max-tokens", "20", "--temperature", "0")
    expected = LLM("demo").generate(
        "It is a truth universally acknowledged, that", SamplingParams(max_tokens=20, temperature=0)
    )
    assert result.returncode == 0
    assert result.stdout == expected.text
    block = BLOCK.search(result.stderr)
    assert block is not None and block.group(4) == str(len(expected.token_ids))
    assert "bundled demo" in result.stderr.splitlines()[0]


@pytest.mark.parametrize("option", ["--backend=scalar", "--kv=paged", "--kv=concat", "--threads=1", "--raw"])
def test_options_that_do_not_show_in_the_text(option: str) -> None:
    plain = run("generate", "--prompt", "Emma", "--max-tokens", "12", "--seed", "5")
    other = run("generate", "--prompt", "Emma", "--max-tokens", "12", "--seed", "5", option)
    assert plain.returncode == other.returncode == 0
    assert other.stdout == plain.stdout != ""
    name, _, value = option.partition("=")
    if name in ("--backend", "--kv"):
        assert f": {value}\n" in other.stderr


@pytest.mark.parametrize("option", ["--dtype=f32", "--dtype=bf16", "--kv-dtype=f16"])
def test_options_that_change_the_arithmetic(option: str) -> None:
    result = run("generate", "--prompt", "Emma", "--max-tokens", "5", "--metrics", "json", option)
    metrics = json.loads(result.stderr.splitlines()[-1])
    name, _, value = option.lstrip("-").partition("=")
    assert metrics[name.replace("-", "_")] == value


def test_the_prompt_comes_from_standard_input() -> None:
    a = run("generate", "--prompt", "-", "--max-tokens", "8", "--seed", "1", stdin="Mr. Darcy é 你好")
    b = run("generate", "--prompt", "Mr. Darcy é 你好", "--max-tokens", "8", "--seed", "1")
    assert a.returncode == 0 and a.stdout == b.stdout != ""


def test_json_metrics_have_all_figures() -> None:
    result = run("generate", "--prompt", "Emma was", "--max-tokens", "9", "--seed", "4", "--metrics", "json")
    metrics = json.loads(result.stderr.splitlines()[-1])
    assert len(metrics["forward_ms"]) == metrics["per_forward_ms"]["n"] == metrics["generated_tokens"]
    assert metrics["time_to_first_token_ms"] == metrics["forward_ms"][0]
    rest = metrics["forward_ms"][1:]
    assert metrics["decode_tokens_per_second"] == pytest.approx(1000 * len(rest) / sum(rest))
    assert metrics["seed"] == 4 and metrics["prompt_tokens"] > 0
    # 6 layers x (K, V) x 2 heads x 64 x 4 bytes, for the prompt and the headroom
    assert metrics["kv_bytes"] == (metrics["prompt_tokens"] + 512) * 6 * 2 * 2 * 64 * 4
    assert metrics["peak_rss_bytes"] > metrics["weight_bytes"] > 5_000_000
    assert metrics["load_ms"] > 0 and metrics["prefill_tokens_per_second"] > 0


def test_a_drawn_seed_is_in_the_metrics_and_repeats_the_text() -> None:
    a = run("generate", "--prompt", "Emma", "--max-tokens", "20", "--metrics", "json")
    seed = json.loads(a.stderr.splitlines()[-1])["seed"]
    b = run("generate", "--prompt", "Emma", "--max-tokens", "20", "--metrics", "json", "--seed", str(seed))
    assert a.stdout == b.stdout


@pytest.mark.parametrize("kv", ["basic", "paged", "concat"])
def test_trace_ops_counts_concat_dim0(kv: str) -> None:
    result = run("generate", "--max-tokens", "5", "--temperature", "0", "--trace-ops", "--kv", kv)
    row = next(line.split() for line in result.stderr.splitlines() if "concat_dim0" in line)
    # 6 layers x (K, V) x 4 decode steps
    assert row[1] == "0" and row[3] == (str(2 * 6 * 4) if kv == "concat" else "0")


def test_no_metrics_leave_standard_error_to_the_notice() -> None:
    result = run("generate", "--prompt", "Emma", "--max-tokens", "3", "--metrics", "none")
    assert len(result.stderr.splitlines()) == 1


def test_stop_strings_end_the_text() -> None:
    full = run("generate", "--max-tokens", "40", "--temperature", "0").stdout
    stop = full[10:14]
    result = run("generate", "--max-tokens", "40", "--temperature", "0", "--stop", stop)
    assert result.stdout == full[: full.index(stop)]


def one_line(result: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "bundled demo" not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("qwen-rs")
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["generate", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["generate", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["generate", "--prompt", ""], ["prompt is empty"]),
        (["generate", "--temperature", "-1"], ["temperature"]),
        (["generate", "--temperature", "nan"], ["temperature"]),
        (["generate", "--top-p", "1.5"], ["top_p"]),
        (["generate", "--min-p", "2"], ["min_p"]),
        (["generate", "--top-k", "-1"], ["top_k"]),
        (["generate", "--repeat-penalty", "0"], ["repetition_penalty"]),
        (["generate", "--seed", "-1"], ["seed"]),
        (["generate", "--stop", ""], ["stop"]),
        (["generate", "--threads", "0"], ["threads"]),
        (["generate", "--threads", "2", "--backend", "scalar"], ["scalar"]),
        (["generate", "--dtype", "q4"], ["--dtype", "q4"]),
        (["generate", "--kv", "none"], ["--kv"]),
        (["generate", "--prompt", "x", "--chat"], ["--chat", "no chat template"]),
        (["generate", "--prompt", "x", "--no-think"], ["--no-think", "no chat template"]),
        (["generate", "--chat", "--raw"], ["not allowed with"]),
        (["generate", "--prompt", "word " * 3000], ["context of 2048"]),
        (["generate", "--model", str(DEMO)], ["--prompt"]),
        (["generate", "--max-tok", "5"], ["unrecognized"]),
        (["write"], ["write"]),
        ([], ["COMMAND"]),
    ],
)
def test_wrong_usage_gets_one_line_and_status_2(args: list[str], parts: list[str]) -> None:
    one_line(run(*args), 2, *parts)


def test_a_wrong_instruction_set_gets_one_line() -> None:
    one_line(run("generate", QWEN_RS_ISA="sse9"), 2, "QWEN_RS_ISA=sse9", "portable")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def broken(copy: Path) -> subprocess.CompletedProcess[str]:
    return run("generate", "--model", str(copy), "--prompt", "Emma", "--max-tokens", "2")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    one_line(broken(copy), 1, name, "No such file")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
)
def test_bad_json_is_named(copy: Path, name: str) -> None:
    (copy / name).write_text('{"a": ')
    one_line(broken(copy), 1, str(copy))


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000_000, -1])
def test_a_truncated_safetensors_file_is_named(copy: Path, keep: int) -> None:
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    one_line(broken(copy), 1, "model.safetensors")


def change_config(copy: Path, **fields: object) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"hidden_size": 512}, ["embed_tokens", "[4096, 256]", "[4096, 512]"]),
        ({"head_dim": 128}, ["q_proj", "shape"]),
        ({"num_hidden_layers": 7}, ["model.layers.6.input_layernorm.weight", "missing"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"num_attention_heads": 0}, ["num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["multiple"]),
        ({"tie_word_embeddings": False}, ["lm_head.weight", "missing"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "not supported"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, ["yarn"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["linear"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
        ({"vocab_size": -5}, ["vocab_size", "-5"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
    ],
)
def test_a_wrong_config_is_named(copy: Path, fields: dict[str, object], parts: list[str]) -> None:
    change_config(copy, **fields)
    one_line(broken(copy), 1, *parts)


def test_a_tensor_of_another_dtype_is_named(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(GOLDEN / "gqa_4_1", tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float64")
    save_file(tensors, copy / "model.safetensors")
    one_line(broken(copy), 1, "model.norm.weight", "F64")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_nan_and_infinity_in_weights_are_refused(tmp_path: Path, name: str, value: str) -> None:
    copy = Path(shutil.copytree(GOLDEN / "gqa_4_1", tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    tensors[name].flat[7] = float(value)
    save_file(tensors, copy / "model.safetensors")
    one_line(broken(copy), 1, name.rsplit(".", 1)[0], "NaN or infinity")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(GOLDEN / "mha_untied_sharded", tmp_path / "model"))
    (copy / "model-00003-of-00006.safetensors").unlink()
    one_line(broken(copy), 1, "model-00003-of-00006.safetensors", "No such file")


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("/no/such/dir", ["/no/such/dir", "no such directory"]),
        (__file__, ["is a directory"]),
        ("nobody/no-such-model", ["nobody/no-such-model"]),
    ],
)
def test_a_model_that_cannot_be_had_is_named(model: str, parts: list[str]) -> None:
    # Offline, so that no test depends on a network.
    one_line(run("generate", "--model", model, "--prompt", "x", HF_HUB_OFFLINE="1"), 1, *parts)


def start_long_generation() -> subprocess.Popen[bytes]:
    """Some seconds of text: the scalar backend, and a seed whose text goes on."""
    args = ["generate", "--backend", "scalar", "--max-tokens", "2000", "--temperature", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qwen_rs.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)
    return process


def test_a_closed_pipe_ends_it_with_one_line() -> None:
    process = start_long_generation()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode().splitlines()[1:]
    assert process.wait(timeout=30) == 1
    assert errors == ["qwen-rs generate: standard output was closed"]


def test_control_c_ends_it_with_one_line() -> None:
    process = start_long_generation()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.decode().splitlines()[1:] == ["qwen-rs generate: interrupted"]


def test_the_chat_template_is_used_unless_raw(copy: Path) -> None:
    shutil.copy(GOLDEN / "chat" / "chat_template.jinja", copy)
    args = ["generate", "--model", str(copy), "--prompt", "Who?", "--max-tokens", "6", "--temperature", "0"]

    def prompt_tokens(*extra: str) -> int:
        result = run(*args, "--metrics", "json", *extra)
        return int(json.loads(result.stderr.splitlines()[-1])["prompt_tokens"])

    llm = LLM(copy)
    for extra, thinking in (([], None), (["--think"], True), (["--no-think"], False)):
        rendered = llm.render_chat([{"role": "user", "content": "Who?"}], enable_thinking=thinking)
        assert prompt_tokens(*extra) == len(llm.tokenizer.encode(rendered))
    assert prompt_tokens("--raw") == len(llm.tokenizer.encode("Who?"))
    one_line(run(*args, "--raw", "--think"), 2, "--think", "--raw")
