"""How prompts are counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from prfaas_env.base import PrfaasError
from prfaas_serving.config import Length
from prfaas_serving.length import LengthCounter, Prompt, messages_text
from tests.serving.support import LONG, run, serving

WORDS = ["hello", "there", "user", "assistant", "you", "<s>", "[UNK]"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of whole words and a chat template."""
    made = Tokenizer(models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} assistant{% endif %}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def counted(settings: Length, body: dict[str, Any], chat: bool = False, ask: Any = None) -> Prompt:
    counter = LengthCounter(settings, ask)
    return asyncio.run(counter.count(body, chat))


def test_the_models_own_tokenizer(tokenizer: Path) -> None:
    found = counted(Length(tokenizer=str(tokenizer)), {"prompt": "hello there you you"})
    assert (found.tokens, found.source, found.ids) == (4, "tokenizer", [0, 1, 4, 4])


def test_the_chat_template_counts(tokenizer: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello there"}]}
    found = counted(Length(tokenizer=str(tokenizer / "tokenizer.json")), body, chat=True)
    assert found.ids == [5, 2, 0, 1, 3]  # <s> user hello there assistant
    body["add_generation_prompt"] = False  # type: ignore[assignment]
    assert counted(Length(tokenizer=str(tokenizer)), body, chat=True).tokens == 4


def test_a_template_that_refuses_falls_back_to_text_and_overhead(tokenizer: Path) -> None:
    (tokenizer / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    body = {"messages": [{"role": "user", "content": "hello there"}]}
    found = counted(Length(tokenizer=str(tokenizer), message_tokens=7), body, chat=True)
    assert found.tokens == 3 + 7


@pytest.mark.parametrize("template", ["{% for %}", "{{ x.__class__.__mro__ }}"])
def test_templates_are_checked_and_boxed_in(tokenizer: Path, template: str) -> None:
    (tokenizer / "chat_template.jinja").write_text(template)
    if template == "{% for %}":
        with pytest.raises(PrfaasError, match="chat template is not valid"):
            LengthCounter(Length(tokenizer=str(tokenizer)))
        return
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert counted(Length(tokenizer=str(tokenizer)), body, chat=True).source == "tokenizer"


def test_long_texts_are_tokenized_aside(tokenizer: Path) -> None:
    found = counted(Length(tokenizer=str(tokenizer)), {"prompt": "hello " * 5000})
    assert found.tokens == 5000


@pytest.mark.parametrize("content", ["", "not json"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(PrfaasError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        LengthCounter(Length(tokenizer=str(tmp_path)))
    file.unlink()
    with pytest.raises(PrfaasError, match=r"tokenizer\.json"):
        LengthCounter(Length(tokenizer=str(tmp_path)))


def test_ids_are_their_own_count() -> None:
    assert counted(Length(), {"prompt": [5, 6, 7]}) == Prompt(3, "ids", ids=[5, 6, 7])


def test_the_estimate_says_that_it_is_one() -> None:
    settings = Length(ask_engine=False, chars_per_token=3.0, message_tokens=5)
    assert counted(settings, {"prompt": "x" * 30}).tokens == 10
    assert counted(settings, {"prompt": "x" * 30}).source == "estimate"
    body = {"messages": [{"role": "user", "content": "x" * 25}, {"role": "user", "content": None}]}
    text, n = messages_text(body)
    assert n == 2
    assert counted(settings, body, chat=True).tokens == len(text) // 3 + 10
    assert counted(settings, {"prompt": ""}).tokens == 1
    assert counted(settings, {}).tokens == 1


def test_tools_count() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    less = counted(Length(ask_engine=False), body, chat=True).tokens
    body["tools"] = [{"type": "function", "function": {"name": "f" * 400}}]
    assert counted(Length(ask_engine=False), body, chat=True).tokens > less + 90


def test_an_engine_that_does_not_answer_costs_a_moment_and_is_counted() -> None:
    async def never(body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    counter = LengthCounter(Length(ask_engine_s=0.05), never)
    found = asyncio.run(counter.count({"prompt": "x" * 40}, False))
    assert (found.tokens, found.source, counter.engine_failures) == (10, "estimate", 1)


def test_the_engine_is_asked_through_the_router() -> None:
    async def work() -> None:
        async with serving() as s:
            await s.complete(LONG)
            assert s.metric("prompt_lengths_total", source="engine") == 1
            assert s.metric("prompt_tokens_total", route="remote") == 300
        async with serving(length={"ask_engine": False}) as s:
            await s.complete(LONG)
            assert s.metric("prompt_lengths_total", source="estimate") == 1

    run(work)
