"""A prompt cache on disk: keys and values of a sequence as a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from .._core import Cache, Model, ModelError

FORMAT = "qwen-rs snapshot 2"


def save_snapshot(path: str | os.PathLike[str], model: Model, cache: Cache) -> None:
    """Writes all rows of a cache: ``layers.N.k`` and ``layers.N.v``, ``[rows, kv_width]`` F32.

    The file appears whole or not at all.

    Raises:
        ValueError: the cache is empty.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> model = Model.load(Path(__file__).parents[1] / "demo")
    >>> cache, again = model.new_cache(), model.new_cache()
    >>> logits = model.prefill(cache, [1, 2, 3])  # [1, vocab_size]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "prompt.safetensors"
    ...     save_snapshot(path, model, cache)
    ...     load_snapshot(path, model, again)
    >>> bool((model.decode(cache, 4) == model.decode(again, 4)).all())
    True
    """
    if cache.seq_len == 0:
        raise ValueError("the cache is empty")
    tensors = {}
    for i, (k, v) in enumerate(model.snapshot(cache)):
        tensors[f"layers.{i}.k"], tensors[f"layers.{i}.v"] = k, v
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        described = {"format": FORMAT, "model": model.fingerprint, "kv_dtype": cache.kv_dtype}
        save_file(tensors, partial, described)
        partial.replace(target)
    except safetensors.SafetensorError as error:
        raise OSError(f"{target}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def load_snapshot(path: str | os.PathLike[str], model: Model, cache: Cache) -> None:
    """Fills an empty cache; what is generated then is bit for bit what the saved sequence gives.

    Raises:
        OSError: the file cannot be read.
        ModelError: it is not a snapshot, or belongs to another model, weight dtype or cache dtype.
        CacheError: the cache is not empty or has no room.
    """
    name = os.fspath(path)
    try:
        with safetensors.safe_open(name, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ModelError(f"{name}: not a qwen-rs snapshot")
            if metadata.get("model") != model.fingerprint:
                raise ModelError(f"{name}: the snapshot belongs to another model or weight dtype")
            if metadata.get("kv_dtype") != cache.kv_dtype:
                # What is generated from here on would be rounded otherwise than in the saved sequence.
                dtypes = f"of a cache of {metadata.get('kv_dtype')}, this one is {cache.kv_dtype}"
                raise ModelError(f"{name}: the snapshot is {dtypes}")
            layers = []
            for i in range(int(model.config["num_hidden_layers"])):
                k, v = (_rows(name, file, f"layers.{i}.{part}") for part in "kv")
                layers.append((k, v))
    except safetensors.SafetensorError as error:
        raise ModelError(f"{name}: not a whole snapshot: {error}") from None
    try:
        model.restore(cache, layers)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from None


def _rows(path: str, file: Any, name: str) -> NDArray[np.float32]:
    stored = file.get_slice(name)
    dtype, shape = stored.get_dtype(), stored.get_shape()
    if dtype != "F32":  # NumPy has no name for some that there are
        raise ModelError(f"{path}: {name} is {dtype}, not F32")
    if len(shape) != 2:
        raise ModelError(f"{path}: {name} has the shape {shape}, not [rows, kv_width]")
    rows: NDArray[np.float32] = file.get_tensor(name)
    if not np.isfinite(rows).all():
        raise ModelError(f"{path}: {name} holds NaN or infinity")
    return rows
