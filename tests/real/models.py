"""Folders of the tiny models, written once per run by the engine's own environment."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from prfaas_env.profiles.hf_config import kv_layout_from_hf_config
from prfaas_env.profiles.kv import KVLayout
from prfaas_serving.workers.processes import write_tiny_models
from tests.real.engines import ENVIRONMENT, FOLDER


@cache
def _written() -> Path:
    folder = FOLDER / "models"
    write_tiny_models(ENVIRONMENT / "bin" / "python", folder, "dense", "hybrid")
    return folder


def folder_of(name: str) -> Path:
    """Folder of `dense` or `hybrid`."""
    return _written() / name


def layout_of(name: str) -> KVLayout:
    """Bytes of its cache, worked out from its configuration: keys and values in the dtype of the weights, recurrent
    state in fp32, the inputs of convolutions in bf16."""
    return kv_layout_from_hf_config(folder_of(name), kv_dtype_bytes=4 if name == "dense" else 2)
