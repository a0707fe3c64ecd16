"""One engine in a process of its own, measuring what it is told to.

Started by ``compare_peers.py``: reads a figure's name a line (``prefill 512``, ``decode @4096``,
``batch 8``) and answers with tokens per second. Also writes the weights that all engines share.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MODULES = {
    "llama.cpp": "llama_cpp",
    "ik_llama.cpp": "ik_llama_cpp",
    "mistral.rs": "mistralrs",
    "transformers": "transformers",
    "openvino": "optimum.intel",
}
"""Peers and the Python modules that carry them."""
MARK = "@engine "
"""Begins the lines that answer; engines may print others."""
STEPS = 16
"""Decode steps of one measurement; the median step counts."""
BATCH_PROMPT = 128
CONTEXT = 4096 + 2 * STEPS


class Runner(Protocol):
    """What a measurement needs of an engine."""

    def reset(self) -> None:
        """Forgets all sequences."""

    def prefill(self, tokens: Sequence[int], sequence: int = 0) -> None:
        """Appends a prompt to a sequence and computes the last token's logits."""

    def decode(self, tokens: Sequence[int]) -> None:
        """One more token for each of the first ``len(tokens)`` sequences."""

    def truncate(self, length: int, sequences: int = 1) -> None:
        """Forgets all but the first ``length`` tokens."""


class QwenRs:
    """qwen-rs through its core."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        from qwen_rs import Model

        self._model = Model.load(checkpoint, threads=threads)
        self._caches: dict[int, Any] = {}

    def reset(self) -> None:
        # Storage stays claimed, as in the peers, which claim all of it at the start.
        for cache in self._caches.values():
            cache.truncate(0)

    def prefill(self, tokens: Sequence[int], sequence: int = 0) -> None:
        cache = self._caches.setdefault(sequence, self._model.new_cache(kv_dtype="f16"))
        self._model.prefill(cache, tokens)

    def decode(self, tokens: Sequence[int]) -> None:
        self._model.decode_batch([self._caches[i] for i in range(len(tokens))], tokens)

    def truncate(self, length: int, sequences: int = 1) -> None:
        for i in range(sequences):
            self._caches[i].truncate(length)


class LlamaCpp:
    """llama.cpp or ik_llama.cpp through the C API of their Python packages."""

    def __init__(self, module: str, gguf: Path, threads: int) -> None:
        c = importlib.import_module(module)
        if not hasattr(c, "llama_decode"):
            c = importlib.import_module(f"{module}._ctypes_api")
        self._c = c
        if hasattr(c, "llama_log_set"):
            self._log = c.llama_log_callback(lambda *_: None)  # kept: the library holds a bare pointer
            c.llama_log_set(self._log, None)
        c.llama_backend_init()
        model_params = c.llama_model_default_params()
        if hasattr(model_params, "repack_tensors"):  # ik_llama.cpp: its interleaved layouts
            model_params.repack_tensors = True
            model_params.use_mmap = False
        if hasattr(model_params, "use_thp"):
            model_params.use_thp = True
        load = getattr(c, "llama_model_load_from_file", None) or c.llama_load_model_from_file
        self._model = load(str(gguf).encode(), model_params)
        params = c.llama_context_default_params()
        params.n_ctx = 8 * 512 + CONTEXT
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = 1  # GGML_TYPE_F16
        params.n_seq_max = 8
        if hasattr(params, "kv_unified"):
            params.kv_unified = True  # else each sequence has an eighth of the context
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = 1
        elif hasattr(params, "flash_attn"):
            params.flash_attn = True
        new = getattr(c, "llama_init_from_model", None) or c.llama_new_context_with_model
        self._context = new(self._model, params)
        if not self._context:
            raise RuntimeError("no context")
        self._batch = c.llama_batch_init(512, 0, 1)
        self._lengths = [0] * 8

    def reset(self) -> None:
        c = self._c
        if hasattr(c, "llama_get_memory"):
            c.llama_memory_clear(c.llama_get_memory(self._context), True)
        else:
            clear = getattr(c, "llama_kv_self_clear", None) or c.llama_kv_cache_clear
            clear(self._context)
        self._lengths = [0] * 8

    def prefill(self, tokens: Sequence[int], sequence: int = 0) -> None:
        for start in range(0, len(tokens), 512):
            part = tokens[start : start + 512]
            self._run([(t, sequence, i == len(part) - 1) for i, t in enumerate(part)])

    def decode(self, tokens: Sequence[int]) -> None:
        self._run([(t, i, True) for i, t in enumerate(tokens)])

    def truncate(self, length: int, sequences: int = 1) -> None:
        c = self._c
        for i in range(sequences):
            if hasattr(c, "llama_get_memory"):
                c.llama_memory_seq_rm(c.llama_get_memory(self._context), i, length, -1)
            else:
                remove = getattr(c, "llama_kv_self_seq_rm", None) or c.llama_kv_cache_seq_rm
                remove(self._context, i, length, -1)
            self._lengths[i] = length

    def _run(self, entries: list[tuple[int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, sequence, logits) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = self._lengths[sequence]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
            self._lengths[sequence] += 1
        if self._c.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._c.llama_get_logits_ith(self._context, -1)  # waits until they are there


class Transformers:
    """transformers in BF16 on torch."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self._caches: dict[int, Any] = {}

    def reset(self) -> None:
        self._caches = {}

    def prefill(self, tokens: Sequence[int], sequence: int = 0) -> None:
        self._run(list(tokens), sequence)

    def decode(self, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            self._run([token], i)

    def truncate(self, length: int, sequences: int = 1) -> None:
        for i in range(sequences):
            self._caches[i].crop(length)

    def _run(self, tokens: list[int], sequence: int) -> None:
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            cache = self._caches.get(sequence)
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._caches[sequence] = output.past_key_values


class MistralRs:
    """mistral.rs: whole requests, timed by its own usage figures. One sequence at a time."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        from mistralrs import Architecture, Runner, Which
        from tokenizers import Tokenizer

        plain = Which.Plain(str(checkpoint), arch=Architecture.Qwen3)
        self._runner = Runner(which=plain, in_situ_quant="Q8_0", prefix_cache_n=0, no_paged_attn=True)
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def measure(self, figure: str) -> float | None:
        from mistralrs import CompletionRequest

        kind, length = _parse(figure)
        if kind == "batch":
            return None
        prompt = self._tokenizer.decode(_tokens(length), skip_special_tokens=False)
        new = 1 if kind == "prefill" else 1 + STEPS
        request = CompletionRequest(prompt, "default", max_tokens=new, top_k=1, ignore_eos=True)
        usage = self._runner.send_completion_request(request).usage
        # The prompt's own tokens are counted: decoded and encoded again they may be a few more or less.
        return float(usage.avg_prompt_tok_per_sec if kind == "prefill" else usage.avg_compl_tok_per_sec)


class OpenVino:
    """OpenVINO through optimum-intel, int8 weights: a greedy generation, timed token by token."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        exported = checkpoint.with_name(checkpoint.name + "-openvino")
        if not exported.exists():
            int8 = OVWeightQuantizationConfig(bits=8)
            model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, quantization_config=int8)
            model.save_pretrained(exported)
        config = {"INFERENCE_NUM_THREADS": str(threads), "KV_CACHE_PRECISION": "f16"}
        self._model = OVModelForCausalLM.from_pretrained(exported, ov_config=config)

    def measure(self, figure: str) -> float | None:
        import torch

        kind, length = _parse(figure)
        if kind == "batch":
            return None
        times = [time.perf_counter()]

        class Clock:
            def put(self, _: object) -> None:
                times.append(time.perf_counter())

            def end(self) -> None: ...

        new = 1 if kind == "prefill" else 1 + STEPS
        ids = torch.tensor([_tokens(length)])
        attention = torch.ones_like(ids)
        self._model.generate(
            ids,
            attention_mask=attention,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            streamer=Clock(),
        )
        # The streamer is given the prompt first, then each token.
        seconds = [b - a for a, b in itertools.pairwise(times[1:])]
        return length / seconds[0] if kind == "prefill" else 1 / statistics.median(seconds[1:])


class Steps:
    """A :class:`Runner`, measured forward pass by forward pass."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def measure(self, figure: str) -> float | None:
        engine = self._runner
        kind, number = _parse(figure)
        engine.reset()
        if kind == "prefill":
            return number / _seconds(lambda: engine.prefill(_tokens(number)))
        sequences = number if kind == "batch" else 1
        for i in range(sequences):
            engine.prefill(_tokens(BATCH_PROMPT if kind == "batch" else number), i)
        step = [5 + i for i in range(sequences)]
        engine.decode(step)  # a warm-up
        return sequences / statistics.median(_seconds(lambda: engine.decode(step)) for _ in range(STEPS))


class Engine(Protocol):
    def measure(self, figure: str) -> float | None:
        """Tokens per second, or None if the engine cannot do it."""


def start(name: str, checkpoint: Path, gguf: Path, threads: int) -> Engine:
    """The engine of that name."""
    if name == "mistral.rs":
        return MistralRs(checkpoint, threads)
    if name == "openvino":
        return OpenVino(checkpoint, threads)
    if name == "transformers":
        return Steps(Transformers(checkpoint, threads))
    if name == "qwen-rs":
        return Steps(QwenRs(checkpoint, threads))
    return Steps(LlamaCpp(MODULES[name], gguf, threads))


def _parse(figure: str) -> tuple[str, int]:
    """What is measured, and how many tokens (of the prompt, or in the cache; at least one) or
    sequences."""
    kind, _, size = figure.partition(" ")
    return kind, max(int(size.lstrip("@")), 1)


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _tokens(count: int) -> list[int]:
    return [(7 * i + 3) % 1000 for i in range(count)]


def write_weights(directory: Path, shape: str) -> tuple[Path, Path]:
    """A random checkpoint and the same weights as Q8_0 GGUF, unless they are there."""
    import random_checkpoint

    checkpoint, gguf = directory / f"{shape}-random", directory / f"{shape}-random-q8_0.gguf"
    if not (checkpoint / "config.json").exists():
        random_checkpoint.write(checkpoint, shape)
    if not gguf.exists() and installed("gguf"):
        partial = gguf.with_suffix(".partial")
        _write_gguf(checkpoint, partial)
        partial.rename(gguf)
    return checkpoint, gguf


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A layer's tensors: checkpoint name, GGUF name."""


def _write_gguf(checkpoint: Path, path: Path) -> None:
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("no_vocab")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in NAMES.items()}
    with (checkpoint / "model.safetensors").open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
        header.pop("__metadata__", None)
        for name, info in header.items():
            start, end = info["data_offsets"]
            file.seek(8 + header_length + start)
            bf16 = np.frombuffer(file.read(end - start), "<u2")
            values = (bf16.astype(np.uint32) << 16).view(np.float32).reshape(info["shape"])
            theirs = names[name.removesuffix(".weight")] + ".weight"
            if values.ndim == 1:
                writer.add_tensor(theirs, values)
            else:
                q8_0 = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(theirs, gguf.quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    name, checkpoint, gguf, threads = sys.argv[1:]
    # Engines print to standard output at will: answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = start(name, Path(checkpoint), Path(gguf), int(threads))
    print(f"{MARK}ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = engine.measure(line.strip())
        except Exception as error:
            print(f"{name}: {line.strip()}: {error}", file=sys.stderr)
            answer = None
        print(f"{MARK}{json.dumps(answer)}", file=answers, flush=True)


if __name__ == "__main__":
    main()
