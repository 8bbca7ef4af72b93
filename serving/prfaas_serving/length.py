"""How long a prompt is, and what text or token ids stand for it: tokenizer file, else the engine, else an estimate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prfaas_env.base import PrfaasError
from prfaas_serving.config import Length

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Source = Literal["ids", "tokenizer", "engine", "estimate"]

#: Prompts above this many characters are tokenized in a thread, so that others do not wait.
_THREAD_CHARACTERS = 8_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as far as routing reads it.

    Args:
        tokens: its length.
        source: where the length comes from; `estimate` is no count.
        ids: its tokens, where they are known.
        text: its text, where tokens are not known: what prefixes are then compared by.
    """

    tokens: int
    source: Source
    ids: Sequence[int] | None = None
    text: str | None = None


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    return ""


def messages_text(body: dict[str, Any]) -> tuple[str, int]:
    """(text of the messages and tools in one fixed form, number of messages)."""
    messages = body.get("messages")
    parts = []
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        parts.append(json.dumps(tools, ensure_ascii=False, default=str))
    count = 0
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            count += 1
            text = f"{message.get('role')}\n{content_text(message.get('content'))}"
            calls = message.get("tool_calls")
            parts.append(f"{text}\n{json.dumps(calls, ensure_ascii=False, default=str)}" if calls else text)
    return "\n\n".join(parts), count


#: Asks an engine: request body in, number of tokens and perhaps the tokens out; None if no engine can say.
AskEngine = Callable[[dict[str, Any]], Awaitable[tuple[int, list[int] | None] | None]]


class LengthCounter:
    """Counts prompts by the settings.

    Args:
        settings: the `length` section.
        ask: asks a worker's /tokenize.
        able: whether there is a worker to ask.

    Raises:
        PrfaasError: the tokenizer cannot be read.
    """

    def __init__(
        self, settings: Length, ask: AskEngine | None = None, able: Callable[[], bool] = lambda: True
    ) -> None:
        self._settings = settings
        self._ask = ask if settings.ask_engine and settings.tokenizer is None else None
        self._able = able
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self.engine_failures = 0
        """Times that the engine was asked and the estimate had to be used."""
        if settings.tokenizer is not None:
            self._tokenizer, self._template = load_tokenizer(settings.tokenizer)

    async def count(self, body: dict[str, Any], chat: bool) -> Prompt:
        """The prompt of a request body (already seen to hold one prompt, not a list of them)."""
        prompt = body.get("prompt")
        if not chat and isinstance(prompt, list):
            return Prompt(len(prompt), "ids", ids=prompt)
        if chat:
            text, messages = messages_text(body)
        else:
            text, messages = prompt if isinstance(prompt, str) else "", 0
        if self._tokenizer is not None:
            return await self._tokenize(body, text, messages, chat)
        if self._ask is not None and self._able():
            found = await self._engine(body)
            if found is not None:
                return found if found.ids is not None else Prompt(found.tokens, "engine", text=text)
        return self._estimate(text, messages)

    def _estimate(self, text: str, messages: int) -> Prompt:
        tokens = int(len(text) / self._settings.chars_per_token) + messages * self._settings.message_tokens
        return Prompt(max(tokens, 1), "estimate", text=text)

    async def _tokenize(self, body: dict[str, Any], text: str, messages: int, chat: bool) -> Prompt:
        assert self._tokenizer is not None
        whole, special, extra = text, True, messages * self._settings.message_tokens
        if chat and self._template is not None:
            rendered = self._template.render(body)
            if rendered is not None:
                whole, special, extra = rendered, False, 0
        encode = self._tokenizer.encode
        if len(whole) > _THREAD_CHARACTERS:
            encoded = await asyncio.to_thread(encode, whole, add_special_tokens=special)
        else:
            encoded = encode(whole, add_special_tokens=special)
        ids = encoded.ids
        return Prompt(max(len(ids) + extra, 1), "tokenizer", ids=ids)

    async def _engine(self, body: dict[str, Any]) -> Prompt | None:
        assert self._ask is not None
        try:
            async with asyncio.timeout(self._settings.ask_engine_s):
                found = await self._ask(body)
        except TimeoutError:
            found = None
        if found is None:
            self.engine_failures += 1
            return None
        tokens, ids = found
        return Prompt(max(tokens, 1), "engine", ids=ids)


class ChatTemplate:
    """The chat template of a model, in a sandbox."""

    def __init__(self, source: str, tokens: dict[str, str], where: str) -> None:
        # only a router with a tokenizer and a template needs it
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise PrfaasError(f"{where}: the chat template is not valid: {error}") from None
        self._tokens = tokens
        self.failures = 0

    def render(self, body: dict[str, Any]) -> str | None:
        """The prompt of a chat request; None where the template refuses it."""
        extra = body.get("chat_template_kwargs")
        try:
            return self._template.render(
                **self._tokens,
                **(extra if isinstance(extra, dict) else {}),
                messages=body.get("messages"),
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
            )
        except Exception:  # a template is a program of its own: anything may come out of it
            self.failures += 1
            return None


def load_tokenizer(path: str) -> tuple[Tokenizer, ChatTemplate | None]:
    """(tokenizer, chat template if there is one) of a `tokenizer.json` or the folder it is in.

    Raises:
        PrfaasError: naming the file.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PrfaasError("length.tokenizer needs tokenizers: pip install 'prfaas-env[serving]'") from None
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise PrfaasError(f"{file}: cannot be read as a tokenizer: {' '.join(str(error).split())}") from None
    return tokenizer, _chat_template(file.parent)


def _chat_template(folder: Path) -> ChatTemplate | None:
    settings: dict[str, Any] = {}
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PrfaasError(f"{config}: is not valid JSON: {error}") from None
    source, where = settings.get("chat_template"), str(config)
    own = folder / "chat_template.jinja"
    if own.is_file():
        source, where = own.read_text(encoding="utf-8"), str(own)
    if not isinstance(source, str):
        return None
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return ChatTemplate(source, tokens, where)
