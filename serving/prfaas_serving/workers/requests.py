"""What a client, or a router, asks a worker for; and the words of the answers.

The API is OpenAI's completions and chat completions with the fields that vLLM adds for a hand-over. What this worker
cannot do is refused by name, never left out silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas_serving.requests import CHAT, ClientError
from prfaas_serving.workers.model import Model, Sampling

#: Tokens of an answer where the client does not say.
DEFAULT_TOKENS = 16
#: Fields that change an answer in a way that is not offered, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "suffix": (None, ""),
    "stop": (None, "", []),
    "stop_token_ids": (None, []),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "use_beam_search": (None, False),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "tools": (None, []),
}


def refusal(message: str, code: str = "invalid_request") -> ClientError:
    """A client's mistake."""
    return ClientError(400, message, code)


@dataclass(frozen=True)
class Asked:
    """One request.

    Args:
        ids: its prompt.
        wanted: tokens of the answer at most.
        least: tokens before an end is accepted.
        handover: its `kv_transfer_params`, empty if none.
    """

    chat: bool
    ids: tuple[int, ...]
    wanted: int
    least: int
    stream: bool
    include_usage: bool
    ignore_eos: bool
    return_ids: bool
    sampling: Sampling
    handover: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefills(self) -> bool:
        """Whether it is a prefill leg."""
        return bool(self.handover.get("do_remote_decode"))

    @property
    def fetches(self) -> bool:
        """Whether its cache is at a prefill worker."""
        return bool(self.handover.get("do_remote_prefill"))

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt that a cache holds: all but the last, from which decoding goes on."""
        return len(self.ids) - 1


def parse(model: Model, path: str, body: dict[str, Any], number: int) -> Asked:
    """Read a request; `number` seeds it where the client does not.

    Raises:
        ClientError: 400.
    """
    chat = path == CHAT
    for name, harmless in _UNSUPPORTED.items():
        if body.get(name) not in harmless:
            raise refusal(f"{name} is not supported by this worker", "unsupported")
    ids = tuple(prompt_ids(model, body, chat))
    wanted = _whole(body, "max_completion_tokens", _whole(body, "max_tokens", DEFAULT_TOKENS))
    if wanted < 1:
        raise refusal("max_tokens must be at least 1")
    room = model.max_model_len - len(ids)
    if room < 1 or wanted > model.max_model_len:
        raise refusal(
            f"This model's maximum context length is {model.max_model_len} tokens; the prompt has {len(ids)}, "
            f"{wanted} are asked for"
        )
    handover = body.get("kv_transfer_params")
    if handover is not None and not isinstance(handover, dict):
        raise refusal("kv_transfer_params must be an object")
    options = body.get("stream_options")
    return Asked(
        chat=chat,
        ids=ids,
        wanted=min(wanted, room),
        least=_whole(body, "min_tokens", 0),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        ignore_eos=body.get("ignore_eos") is True,
        return_ids=body.get("return_token_ids") is True,
        sampling=Sampling(_temperature(body), _whole(body, "seed", number)),
        handover=handover or {},
    )


def prompt_ids(model: Model, body: Mapping[str, Any], chat: bool) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ClientError: 400.
    """
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise refusal("messages must be a list with at least one message")
        try:
            ids = model.encode_chat(messages)
        except ValueError as error:
            raise refusal(str(error)) from None
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = model.encode(prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            ids = prompt
        else:
            raise refusal("prompt must be one text or one list of token ids")
    if not ids:
        raise refusal("the prompt is empty")
    if min(ids) < 0 or max(ids) >= model.vocabulary:
        raise refusal(f"token ids must be within 0..{model.vocabulary - 1}")
    return ids


def _whole(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise refusal(f"{name} must be a whole number (found {value!r:.40})")
    return value


def _temperature(body: Mapping[str, Any]) -> float:
    value = body.get("temperature")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise refusal(f"temperature must be a number of at least 0 (found {value!r:.40})")
    return float(value)


# ---------------------------------------------------------------------------------------- answers


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage object; nothing is ever cached here between requests."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@dataclass(frozen=True)
class Words:
    """Writes the answers to one request."""

    model: str
    identity: str
    created: int
    asked: Asked

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}

    def whole(
        self, text: str, ids: Sequence[int], finish: str, handover: dict[str, Any] | None
    ) -> dict[str, Any]:
        """An answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.asked.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.asked.return_ids:
            choice["token_ids"] = list(ids)
        return {
            **self._head("chat.completion" if self.asked.chat else "text_completion"),
            "choices": [choice],
            "usage": usage(len(self.asked.ids), len(ids)),
            "kv_transfer_params": handover,
        }

    def chunk(self, text: str | None, ids: Sequence[int], finish: str | None) -> dict[str, Any]:
        """A piece of a stream; without text the one that names the role of a chat answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if not self.asked.chat:
            choice["text"] = text or ""
        elif text is None:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["delta"] = {"content": text}
        if self.asked.return_ids and ids:
            choice["token_ids"] = list(ids)
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {**self._head(kind), "choices": [choice]}

    def usage_chunk(self, tokens: int) -> dict[str, Any]:
        """The last piece of a stream where usage is asked for."""
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(len(self.asked.ids), tokens)}


class Text:
    """Text of a growing answer, in pieces that together are the whole.

    Bytes of a character that is not complete yet are held back.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.ids: list[int] = []
        self._from = self._read = 0

    def add(self, token: int, last: bool) -> str:
        """The text that a further token adds."""
        self.ids.append(token)
        # some tokenizers write a token differently at the start, so the piece before goes along
        before = self._model.decode(self.ids[self._from : self._read])
        text = self._model.decode(self.ids[self._from :])
        if text.endswith("\ufffd") and not last:
            return ""
        self._from, self._read = self._read, len(self.ids)
        return text[len(before) :]
