"""Renders chat messages with the template that came with the model.

Owns the checks on messages and what a template may see; knows nothing of token ids except how control tokens are spelled.
Invariant: control tokens that a message spells are told apart from those the template wrote.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes

from poise.errors import InvalidRequestError
from poise.tokenizer.control_tokens import ControlTokens, check_unicode
from poise.tokenizer.template_sandbox import TemplateEnvironment, render_within

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_LENGTH = 256 * 1024
MIN_OUTPUT_LIMIT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`text` is the prompt. `marked` is as long, with control tokens that messages spelled broken by private-use characters."""

    text: str
    marked: str


class ChatTemplate:
    """A model's chat template, compiled when first used."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        control_tokens: ControlTokens,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._control_tokens = control_tokens
        self._lock = threading.Lock()
        self._compiled: _Compiled | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """The prompt for `messages` (OpenAI's shape). `template_kwargs`: `enable_thinking` only, where the template reads it.

        `continue_final_message` ends the prompt inside the last message, which must be the assistant's. Raises
        InvalidRequestError for a model without template, a bad message, or an error the template raises.
        """
        compiled = self._compile()
        conversation = _read_messages(messages, compiled)
        arguments = _read_arguments(template_kwargs or {}, compiled)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message needs add_generation_prompt=false",
                    "continue_final_message",
                )
            if conversation[-1]["role"] != "assistant":
                raise InvalidRequestError(
                    f"continue_final_message: the last message is the {conversation[-1]['role']}'s, "
                    "expected the assistant's",
                    "continue_final_message",
                )
        marked, mend = self._mark(conversation)
        variables = {
            **self._special_tokens,
            **arguments,
            "messages": marked,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        given = sum(len(text) for message in marked for text in message.values())
        text = _render(compiled.template, variables, max(MIN_OUTPUT_LIMIT, 4 * given))
        if continue_final_message:
            text = _cut_after(text, marked[-1]["content"])
        return RenderedChat(text.translate(mend) if mend else text, text)

    def _mark(
        self, conversation: list[dict[str, str]]
    ) -> tuple[list[dict[str, str]], dict[int, str]]:
        """The messages with control tokens in them broken, and the table that mends the prompt."""
        texts = [text for message in conversation for key, text in message.items() if key != "role"]
        avoid = (self._source or "") + "".join(self._special_tokens.values())
        marked, mend = self._control_tokens.mark(texts, avoid)
        remaining = iter(marked)
        return [
            {key: text if key == "role" else next(remaining) for key, text in message.items()}
            for message in conversation
        ], mend

    def _compile(self) -> _Compiled:
        if self._source is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions with a prompt instead",
                "messages",
            )
        with self._lock:
            if self._compiled is None:
                self._compiled = _compile(self._source)
            return self._compiled


@dataclass(frozen=True, slots=True)
class _Compiled:
    """`reads`: names of variables, attributes and string constants in the template."""

    template: jinja2.Template
    reads: frozenset[str]


def _compile(source: str) -> _Compiled:
    try:
        if len(source) > MAX_TEMPLATE_LENGTH:
            raise ValueError(f"it is longer than {MAX_TEMPLATE_LENGTH} characters")
        environment = TemplateEnvironment()
        tree = environment.parse(source)
        reads = set(meta.find_undeclared_variables(tree))
        reads.update(node.attr for node in tree.find_all(nodes.Getattr))
        reads.update(
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        )
        return _Compiled(environment.from_string(source), frozenset(reads))
    except (
        jinja2.TemplateError,
        ArithmeticError,
        MemoryError,
        RecursionError,
        SyntaxError,
        ValueError,
    ) as error:
        raise InvalidRequestError(
            f"this model's chat template can't be used: {_one_line(error)}", "messages"
        ) from None


def _render(template: jinja2.Template, variables: dict[str, Any], max_output: int) -> str:
    try:
        return render_within(template, variables, max_output)
    except (
        Exception
    ) as error:  # a template is foreign code: whatever it raises is its answer to these messages
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {_one_line(error)}", "messages"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _read_messages(
    messages: Sequence[Mapping[str, object]], compiled: _Compiled
) -> list[dict[str, str]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("messages is empty or not a list", "messages")
    return [_read_message(f"messages[{i}]", m, compiled) for i, m in enumerate(messages)]


def _read_message(where: str, message: object, compiled: _Compiled) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is {message!r:.100}, expected an object", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {role!r:.100}, expected one of {', '.join(ROLES)}", "messages"
        )
    if role == "developer" and "developer" not in compiled.reads:
        role = "system"  # OpenAI's newer name for it
    result = {"role": str(role), "content": _read_content(where, message.get("content"))}
    for key, value in message.items():
        if key in result or value is None or value == []:
            continue
        if key not in ("name", "reasoning_content", "tool_call_id") or key not in compiled.reads:
            raise InvalidRequestError(
                f"{where}.{key:.100} is not supported by this model's chat template", "messages"
            )
        if not isinstance(value, str):
            raise InvalidRequestError(
                f"{where}.{key} is {value!r:.100}, expected a string", "messages"
            )
        result[key] = value
    for key, text in result.items():
        check_unicode(text, f"{where}.{key}", "messages")
    return result


def _read_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(
            f"{where}.content is {content!r:.100}, expected a string or a list of text parts",
            "messages",
        )
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequestError(
                f"{where}.content[{i}] has type {kind!r:.100}, only text parts are supported",
                "messages",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{where}.content[{i}].text is {part.get('text')!r:.100}, expected a string",
                "messages",
            )
        texts.append(part["text"])
    return "".join(texts)


def _read_arguments(arguments: Mapping[str, object], compiled: _Compiled) -> dict[str, object]:
    for name, value in arguments.items():
        if name != "enable_thinking" or name not in compiled.reads:
            raise InvalidRequestError(
                f"chat_template_kwargs.{name:.100} is not read by this model's chat template",
                "chat_template_kwargs",
            )
        if not isinstance(value, bool):
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} is {value!r:.100}, expected true or false",
                "chat_template_kwargs",
            )
    return dict(arguments)


def _cut_after(text: str, content: str) -> str:
    """`text` up to the end of the last message, as Hugging Face does it: templates may trim what they print."""
    start = text.rfind(content.strip())
    if start < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template changes the last message, so it can't be continued",
            "continue_final_message",
        )
    kept = content.lstrip()
    if not text.startswith(kept, start):
        kept = content.strip()
    return text[: start + len(kept)]
