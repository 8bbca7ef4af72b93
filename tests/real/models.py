"""Folders of the tiny models, written once per run by the engine's own environment."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from prfaas_env.profiles.hf_config import kv_layout_from_hf_config
from prfaas_env.profiles.kv import KVLayout
from prfaas_serving import workers
from tests.real.engines import ENVIRONMENT, FOLDER


@cache
def _written() -> Path:
    folder = FOLDER / "models"
    script = Path(workers.__file__).parent / "tiny_models.py"
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), str(script), str(folder), "dense", "hybrid"],
        env={**settings, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the tiny models could not be written:\n{done.stderr[-2000:]}")
    return folder


def folder_of(name: str) -> Path:
    """Folder of `dense` or `hybrid`."""
    return _written() / name


def layout_of(name: str) -> KVLayout:
    """Bytes of its cache, worked out from its configuration: keys and values in the dtype of the weights, recurrent
    state in fp32, the inputs of convolutions in bf16."""
    return kv_layout_from_hf_config(folder_of(name), kv_dtype_bytes=4 if name == "dense" else 2)
