"""Qwen3 language models on ordinary CPUs.

>>> from qwen_rs import LLM, SamplingParams
>>> with LLM("demo") as llm:
...     output = llm.generate("Emma Woodhouse", SamplingParams(max_tokens=8, temperature=0))
>>> output.finish_reason
'length'

``LLM`` loads a checkpoint and generates; ``Model``, ``Cache``, ``Pool`` and ``Sampler`` are the
pieces for a loop of your own.
"""

from importlib import metadata

from ._core import (
    Cache,
    CacheError,
    Model,
    ModelError,
    Pool,
    Sampler,
    available_isas,
    default_threads,
    quantize_q8_0,
)
from .checkpoint.chat_template import ChatPrompt, ChatTemplate, Message
from .checkpoint.tokenizer import Tokenizer
from .engine.llm import LLM
from .engine.metrics import Metrics
from .engine.outputs import ChatOutput, Output, Piece
from .engine.sampling_params import SamplingParams
from .engine.snapshot import load_snapshot, save_snapshot

__all__ = [
    "LLM",
    "Cache",
    "CacheError",
    "ChatOutput",
    "ChatPrompt",
    "ChatTemplate",
    "Message",
    "Metrics",
    "Model",
    "ModelError",
    "Output",
    "Piece",
    "Pool",
    "Sampler",
    "SamplingParams",
    "Tokenizer",
    "available_isas",
    "default_threads",
    "load_snapshot",
    "quantize_q8_0",
    "save_snapshot",
]
try:
    __version__ = metadata.version("qwen-rs")  # Cargo.toml's, through maturin
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
