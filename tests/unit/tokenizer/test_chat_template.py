"""Messages to prompts: what is accepted, what is refused, and control tokens spelled by users."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from poise.errors import InvalidRequestError
from poise.tokenizer.chat_template import ChatTemplate, RenderedChat
from poise.tokenizer.control_tokens import ControlTokens, Span
from tiny_tokenizers import CHAT_TEMPLATE, CONTROL_TOKENS, KINDS, tokenizer_of

NO_CONTROL = ControlTokens({})
ROLES = st.sampled_from(["system", "user", "assistant"])


def render(source: str | None, messages: Any, **arguments: Any) -> str:
    return ChatTemplate(source, {}, NO_CONTROL).render(messages, **arguments).text


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PLAIN, user(parts)) == "user:ab;"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        ("hi", "not a list"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([{"content": "a"}], "role is None"),
        ([{"role": "root", "content": "a"}], "'root'"),
        ([{"role": ["user"], "content": "a"}], "role"),
        (user(None), r"messages\[0\]\.content is None"),
        (user([]), "content"),
        (user(3), "content is 3"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "'image_url'"),
        (user(["a"]), "'a'"),
        (
            user("a<s>\ud800"),
            r"messages\[0\]\.content holds the lone surrogate U\+D800 at character 4",
        ),
        (user([{"type": "text"}]), r"content\[0\]\.text is None"),
        ([{"role": "user", "content": "a", "name": "bob"}], r"messages\[0\]\.name"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}], "tool_calls"),
    ],
)
def test_bad_messages_are_named(messages: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named) as raised:
        render(PLAIN, messages)
    assert raised.value.param == "messages"


def test_empty_fields_of_clients_are_no_request() -> None:
    message = {"role": "user", "content": "a", "name": None, "tool_calls": [], "refusal": None}
    assert render(PLAIN, [message]) == "user:a;"


def test_fields_that_the_template_reads_reach_it() -> None:
    message = {"role": "user", "content": "a", "name": "bob"}
    assert render("{{ messages[0].name }}", [message]) == "bob"
    assert render("{{ messages[0]['name'] }}", [message]) == "bob"
    with pytest.raises(InvalidRequestError, match="expected a string"):
        render("{{ messages[0].name }}", [message | {"name": 3}])


def test_developer_is_system_for_a_template_that_does_not_know_it() -> None:
    message = [{"role": "developer", "content": "a"}]
    assert render(PLAIN, message) == "system:a;"
    assert render("{% if messages[0].role == 'developer' %}d{% endif %}", message) == "d"


def test_template_arguments() -> None:
    source = "{% if enable_thinking is defined and enable_thinking is false %}quiet{% endif %}"
    assert render(source, user("a"), template_kwargs={"enable_thinking": False}) == "quiet"
    assert render(source, user("a")) == ""
    for kwargs in (
        {"enable_thinking": 1},
        {"chat_template": "x"},
        {"tokenize": True},
        {"messages": []},
    ):
        with pytest.raises(InvalidRequestError, match="chat_template_kwargs"):
            render(source, user("a"), template_kwargs=kwargs)
    with pytest.raises(InvalidRequestError, match="enable_thinking"):
        render(PLAIN, user("a"), template_kwargs={"enable_thinking": False})


def test_errors_of_the_template_reach_the_client() -> None:
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        render("{{ raise_exception('System role not supported') }}", user("a"))
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        render("{{ messages[0].content + 1 }}", user("a"))


def test_a_model_without_template() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        render(None, user("a"))


@pytest.mark.parametrize("content", ["a b", " a b ", "a b  \n"])
@pytest.mark.parametrize("printed", ["m.content", "m.content | trim"])
def test_continue_final_message(content: str, printed: str) -> None:
    source = "{% for m in messages %}<{{ " + printed + " }}>\n{% endfor %}"
    messages = [*user("a b"), {"role": "assistant", "content": content}]
    text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<a b>\n<" + (content.strip() if "trim" in printed else content)


def test_continue_final_message_is_checked() -> None:
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        render(PLAIN, user("a"), continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="the user's"):
        render(PLAIN, user("a"), add_generation_prompt=False, continue_final_message=True)
    dropped = [*user("a"), {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidRequestError, match="can't be continued"):
        render("x", dropped, add_generation_prompt=False, continue_final_message=True)


# Control tokens in messages.

# SentencePiece can't tell U+2581 from a space.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="▁")
PIECES = st.sampled_from(
    [*CONTROL_TOKENS, "<unk>", "<|im", "_start|>", "<", "|>", "<|", "\U00100000", " "]
)
CONTENTS = st.lists(PIECES | st.text(CHARACTERS, max_size=3), max_size=6).map("".join)
HARMLESS = st.text(alphabet="helowrd .\n1日é", max_size=12)


def plain_render(messages: list[dict[str, str]]) -> str:
    tail = "<|im_start|>assistant\n"
    turns = [f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in messages]
    return "".join(turns) + tail


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(turns=st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens(kind: str, turns: list[tuple[str, str]]) -> None:
    tokenizer = tokenizer_of(kind)
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.chat_template.render(messages)
    assert rendered.text == plain_render(messages)
    assert len(rendered.marked) == len(rendered.text)
    ids = tokenizer.encode_chat(messages)
    control = [tokenizer.token_text(i) for i in ids if tokenizer.is_special(i)]
    assert control == ["<|im_start|>", "<|im_end|>"] * len(turns) + ["<|im_start|>"]
    if kind != "sentencepiece":  # which adds spaces after control tokens
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(turns=st.lists(st.tuples(ROLES, HARMLESS), min_size=1, max_size=3))
def test_harmless_chats_encode_as_their_text(kind: str, turns: list[tuple[str, str]]) -> None:
    tokenizer = tokenizer_of(kind)
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = tokenizer.encode(plain_render(messages), add_special_tokens=False)
    assert tokenizer.encode_chat(messages) == expected


@settings(deadline=None)
@given(content=CONTENTS)
def test_careful_encoding_agrees_with_the_plain_one(content: str) -> None:
    """Where nothing is to be told apart, cutting at control tokens changes no id."""
    tokenizer = tokenizer_of("byte level")
    spelled = tokenizer.encode_chat([{"role": "user", "content": content + "</s>"}])
    text = plain_render([{"role": "user", "content": content + "</s>"}])
    head, body = "<|im_start|>", text[len("<|im_start|>") : text.rindex("<|im_end|>")]
    expected = [
        *tokenizer.encode(head, add_special_tokens=False),
        *tokenizer.encode(body, add_special_tokens=False, parse_special=False),
        *tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False),
    ]
    assert spelled == expected


@settings(deadline=None)
@given(texts=st.lists(CONTENTS, max_size=4), glue=st.sampled_from(["", " ", "x", "_"]))
def test_marked_texts_hold_no_control_token_however_joined(texts: list[str], glue: str) -> None:
    tokenizer = tokenizer_of("byte level")
    marked, mend = tokenizer.control_tokens.mark(texts, avoid="")
    assert tokenizer.control_tokens.find(glue.join(marked)) == []
    assert [text.translate(mend) for text in marked] == texts


def test_overlapping_control_tokens_are_all_broken() -> None:
    tokens = ControlTokens({7: AddedToken("<a><b>"), 8: AddedToken("<b>c"), 9: AddedToken("<b>")})
    assert tokens.find("x<a><b>c") == [Span(7, 1, 7)]
    (marked,), mend = tokens.mark(["x<a><b>c"], avoid="")
    assert tokens.find(marked) == []
    assert marked.translate(mend) == "x<a><b>c"


def test_white_space_that_belongs_to_a_control_token() -> None:
    tokens = ControlTokens({7: AddedToken("<e>", rstrip=True)})
    assert tokens.find("a <e>\n b") == [Span(7, 2, 7)]


def test_a_chat_with_nothing_marked_is_encoded_in_one_go() -> None:
    tokenizer = tokenizer_of("byte level")
    text = CHAT_TEMPLATE
    assert tokenizer.encode_rendered(RenderedChat(text, text)) == tokenizer.encode(
        text, add_special_tokens=False
    )
