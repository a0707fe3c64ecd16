"""The Rust core. Shapes stand beside every array; errors beside every call."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Cache",
    "CacheError",
    "Engine",
    "Event",
    "Model",
    "ModelError",
    "Pool",
    "Sampler",
    "available_isas",
    "default_threads",
    "quantize_q8_0",
    "weight_dtypes",
]

class ModelError(Exception): ...
class CacheError(Exception): ...

@final
class Model:
    @staticmethod
    def load(
        directory: str | PathLike[str],
        *,
        dtype: str = "q8_0",
        backend: str = "simd",
        threads: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> Model: ...
    @staticmethod
    def random(
        config: str,
        *,
        dtype: str = "q8_0",
        backend: str = "simd",
        threads: int | None = None,
        seed: int = 0,
    ) -> Model: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def backend(self) -> str: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def activations(self) -> Literal["int8", "f32"]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def new_cache(self, kind: str = "basic", *, kv_dtype: str = "f32") -> Cache: ...
    def new_pool(self, num_blocks: int, *, block_rows: int = 64, kv_dtype: str = "f32") -> Pool: ...
    def prefill(
        self, cache: Cache, tokens: Sequence[int], *, all_logits: bool = False
    ) -> NDArray[np.float32]: ...
    def decode(self, cache: Cache, token: int) -> NDArray[np.float32]: ...
    def decode_batch(self, caches: Sequence[Cache], tokens: Sequence[int]) -> NDArray[np.float32]: ...
    def snapshot(self, cache: Cache) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]: ...
    def restore(
        self, cache: Cache, layers: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]
    ) -> None: ...
    def trace_ops(self, enabled: bool) -> None: ...
    def ceilings(self) -> tuple[float, float, float]: ...
    def op_stats(self) -> list[tuple[Literal["prefill", "decode"], str, int, float]]: ...

@final
class Cache:
    @property
    def seq_len(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    def truncate(self, rows: int) -> None: ...
    def fork(self) -> Cache: ...

@final
class Pool:
    def new_cache(self) -> Cache: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def block_rows(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

@final
class Sampler:
    def __new__(
        cls,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        prompt: Sequence[int] = ...,
    ) -> Sampler: ...
    def sample(self, logits: NDArray[np.float32]) -> int: ...

def weight_dtypes() -> list[str]: ...
def quantize_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]: ...
def available_isas() -> list[str]: ...
def default_threads() -> int: ...

@final
class Event:
    @property
    def id(self) -> int: ...
    @property
    def token(self) -> int | None: ...
    @property
    def logprobs(self) -> list[tuple[int, float]]: ...
    @property
    def milliseconds(self) -> float: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def last(self) -> bool: ...
    @property
    def prompt_logprobs(self) -> list[list[tuple[int, float]]] | None: ...
    @property
    def error(self) -> BaseException | None: ...

@final
class Engine:
    def __new__(
        cls,
        model: Model,
        *,
        kv: str = "basic",
        kv_dtype: str = "f32",
        num_blocks: int = 1,
        block_rows: int = 64,
        max_num_seqs: int = 16,
        step_goal_ms: float | None = None,
    ) -> Engine: ...
    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        logit_bias: Sequence[tuple[int, float]] = ...,
        end_ids: Sequence[int] = ...,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        salt: str = ...,
        priority: int = 0,
        constrained: bool = False,
    ) -> int: ...
    def cancel(self, id: int) -> None: ...
    def allow(self, id: int, tokens: bytes) -> None: ...
    def wake(self) -> None: ...
    def step(self, wait: float = 0.0) -> list[Event]: ...
    def counters(self) -> dict[str, Any]: ...
