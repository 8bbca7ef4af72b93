"""The vLLM backend: which hand-overs belong to the prompt that was prefilled."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas_serving.backends.vllm_nixl import VllmNixl


@pytest.mark.parametrize(
    ("held", "prompt", "mismatch"),
    [
        (1000, 1000, False),
        (999, 1000, False),  # recurrent state: as of the last token but one
        (996, 1000, False),  # several prediction modules
        (995, 1000, True),
        (1001, 1000, True),
        (0, 1000, True),
        (None, 1000, False),
        (1000, None, False),
    ],
)
def test_a_handle_belongs_to_its_prompt(held: Any, prompt: Any, mismatch: bool) -> None:
    answer = {"usage": {"prompt_tokens": prompt}}
    assert VllmNixl().mismatch(answer, {"remote_num_tokens": held}) is mismatch
