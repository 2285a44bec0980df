"""The table of request fields: which change the answer, which are taken at a neutral value only, which have no effect.

Invariant: a field that isn't in the endpoint's table, or stands at a value we can't honour, never gets past `sift`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from poise.errors import InvalidRequestError
from poise.server.http_errors import shown

MAX_DROPPED_NAMES = 20


class Effect(Enum):
    """What a field may do."""

    USED = "affects the answer"
    NEUTRAL = "accepted at a neutral value only"
    NONE = "bookkeeping without effect"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of an endpoint. `neutral` lists the values at which an unsupported field changes nothing (null always does)."""

    effect: Effect
    neutral: tuple[object, ...] = ()


def _used(names: str) -> dict[str, Parameter]:
    return {name: Parameter(Effect.USED) for name in names.split()}


def _neutral(**values: tuple[object, ...]) -> dict[str, Parameter]:
    return {name: Parameter(Effect.NEUTRAL, allowed) for name, allowed in values.items()}


_NO_EFFECT = {
    name: Parameter(Effect.NONE)
    for name in (
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    )
}

_SAMPLING = _used(
    "model n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
    "stop_token_ids ignore_eos max_tokens min_tokens logit_bias allowed_token_ids bad_words skip_special_tokens "
    "include_stop_str_in_output logprobs prompt_logprobs stream stream_options return_token_ids "
    "return_tokens_as_token_ids priority cache_salt deadline_ms service_class speculative"
)

_UNSUPPORTED = _neutral(
    store=(False,),
    use_beam_search=(False,),
    length_penalty=(1, 1.0),
    spaces_between_special_tokens=(True,),
    truncate_prompt_tokens=(),
    logprob_token_ids=([],),
    response_format=({"type": "text"},),
    structured_outputs=(),
    guided_json=(),
    guided_regex=(),
    guided_choice=(),
    guided_grammar=(),
    request_id=(),
    kv_transfer_params=(),
    vllm_xargs=(),
    repetition_detection=(),
    stream_interval=(1,),
)

COMPLETION_PARAMETERS: Mapping[str, Parameter] = {
    **_SAMPLING,
    **_used("prompt echo best_of add_special_tokens"),
    **_UNSUPPORTED,
    **_neutral(suffix=("",)),
    **_NO_EFFECT,
}

CHAT_PARAMETERS: Mapping[str, Parameter] = {
    **_SAMPLING,
    **_used(
        "messages max_completion_tokens top_logprobs add_generation_prompt continue_final_message "
        "chat_template_kwargs"
    ),
    **_UNSUPPORTED,
    **_neutral(
        add_special_tokens=(False,),
        echo=(False,),
        best_of=(1,),
        tools=([],),
        tool_choice=("none", "auto"),
        parallel_tool_calls=(True, False),  # of the no tools that there are
        functions=([],),
        function_call=("none", "auto"),
        modalities=(["text"],),
        audio=(),
        prediction=(),
        moderation=(),
        web_search_options=(),
        reasoning_effort=(),
        verbosity=(),
        thinking_token_budget=(),
        include_reasoning=(True,),
        documents=([],),
        chat_template=(),
    ),
    **_NO_EFFECT,
}

TOKENIZE_PARAMETERS: Mapping[str, Parameter] = {
    **_used(
        "model prompt messages add_special_tokens return_token_strs add_generation_prompt "
        "continue_final_message chat_template_kwargs"
    ),
    **_neutral(chat_template=(), tools=([],)),
}

DETOKENIZE_PARAMETERS: Mapping[str, Parameter] = _used("model tokens")

STREAM_OPTIONS: Mapping[str, Parameter] = {
    **_used("include_usage continuous_usage_stats"),
    **_neutral(include_obfuscation=(False,)),
}


def sift(
    body: Mapping[str, object],
    table: Mapping[str, Parameter],
    *,
    lenient: bool = False,
    prefix: str = "",
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Returns the fields in use (nulls left out: they mean the default) and the unknown names that were dropped.

    Raises InvalidRequestError for an unknown name (unless `lenient`) and for an unsupported value.
    """
    values: dict[str, object] = {}
    dropped: list[str] = []
    for name, value in body.items():
        parameter = table.get(name)
        if parameter is None:
            if not lenient:
                raise _unknown(name, table, prefix)
            dropped.append(name)
        elif value is None or parameter.effect is Effect.NONE:
            continue
        elif parameter.effect is Effect.USED:
            values[name] = value
        elif not any(_same(value, allowed) for allowed in parameter.neutral):
            raise InvalidRequestError(
                f"{prefix}{name} is {shown(value)}, which isn't supported; "
                f"leave it out{_or_one_of(parameter)}.",
                prefix + name,
                "unsupported_parameter",
            )
    return values, tuple(dropped[:MAX_DROPPED_NAMES])


def _unknown(name: str, table: Mapping[str, Parameter], prefix: str) -> InvalidRequestError:
    near = difflib.get_close_matches(name[:64], table, n=1, cutoff=0.6)
    hint = f"did you mean {prefix}{near[0]}?" if near else "it would have been ignored."
    return InvalidRequestError(
        f"Unknown parameter {shown(prefix + name)}; {hint}",
        (prefix + name)[:128],
        "unknown_parameter",
    )


def _same(value: object, allowed: object) -> bool:
    """Equality that doesn't take true for 1."""
    return type(value) is type(allowed) and value == allowed


def _or_one_of(parameter: Parameter) -> str:
    if not parameter.neutral:
        return ""
    return " or send " + " or ".join(shown(value) for value in parameter.neutral)
