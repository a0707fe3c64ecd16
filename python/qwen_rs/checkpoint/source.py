"""Where a model comes from: the bundled demo, a directory, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._core import ModelError
from .tokenizer import Tokenizer, read_json

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
# What a checkpoint consists of; a repository may hold the same weights in other formats too.
FILES = ["*.json", "*.jinja", "*.safetensors"]


def resolve(model: str | os.PathLike[str]) -> Path:
    """The checkpoint directory of ``"demo"``, a directory, or a hub id such as ``Qwen/Qwen3-0.6B``.

    A hub id is downloaded by huggingface_hub, with its cache, its token and its offline switch
    (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``).

    Raises:
        ValueError: the name is empty.
        OSError: there is no such directory, or the hub cannot give the model; the message says why.
    """
    name = os.fspath(model)
    if not name:
        raise ValueError("model must be a directory, a hub id or 'demo', not ''")
    if name == DEMO:
        return Path(__file__).parents[1] / "demo"
    path = Path(os.path.expanduser(name))  # unlike Path's, it leaves a user who does not exist as text
    if path.is_dir():
        return path
    if path.exists():
        raise NotADirectoryError(f"{name}: a checkpoint is a directory, this is a file")
    if HUB_ID.fullmatch(name):
        return _download(name)
    raise FileNotFoundError(f"{name}: no such directory (a hub id looks like Qwen/Qwen3-0.6B)")


def _download(repo_id: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=FILES))
    except errors.GatedRepoError:
        reason = "the repository is gated: accept its terms on the hub and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "no such repository on the hub, and no such directory here"
    except errors.LocalEntryNotFoundError:
        reason = (
            "the hub cannot be reached (no network, or HF_HUB_OFFLINE is set) and the model is not in "
            "the local cache; give --model a directory instead"
        )
    except Exception as error:  # whatever the hub's transport raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise OSError(f"{repo_id}: {reason}")


def generation_config(directory: Path) -> dict[str, Any]:
    """``generation_config.json``, or nothing."""
    path = directory / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    if not isinstance(config, dict):
        raise ModelError(f"{path}: an object is expected")
    return config


def end_of_sequence_ids(
    directory: Path, generation_config: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    """Every id that ends a sequence: of ``generation_config.json``, else of ``config.json``, else the
    tokenizer's ``eos_token``. Each may be one id or a list."""
    config = read_json(directory / "config.json")
    for name, source in (("generation_config.json", generation_config), ("config.json", config)):
        value = source.get("eos_token_id") if isinstance(source, Mapping) else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(f"{directory / name}: eos_token_id must be an id or a list of ids")
        if ids:
            return frozenset(ids)
    token = tokenizer.special_token("eos_token")
    token_id = tokenizer.token_id(token) if token is not None else None
    return frozenset() if token_id is None else frozenset([token_id])
