"""Parses a generation request once: from a JSON object to a `ValidRequest` that the rest of the edge trusts.

Invariant: a `ValidRequest` fits the engine, and every field of the body was used, neutral, or named in `dropped`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from poise.core.request import RequestOwner
from poise.core.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from poise.engine.client import EngineInfo, EngineRequest
from poise.errors import InvalidRequestError, ModelNotFoundError
from poise.server.callers import Caller
from poise.server.fields import Fields, check_number, wrong_type
from poise.server.http_errors import shown
from poise.server.ownership import Origin
from poise.server.parameters import CHAT_PARAMETERS, COMPLETION_PARAMETERS, STREAM_OPTIONS, sift
from poise.server.prompts import Prompt, PromptEncoder

MAX_PROMPTS = 256
MAX_CHOICES = 1024  # prompts times n
MAX_LOGPROB_ENTRIES = (
    2_000_000  # positions times entries each: some 250 MB while the answer is put together
)
DEFAULT_COMPLETION_TOKENS = 16
MAX_TOKENS = 2**31 - 1
# A drawn seed stays below 2**53: JavaScript and jq keep such integers exactly, so that a seed read from an answer
# and sent back is the same seed.
SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request fit to run. `params[i]` and `owners[i]` belong to `prompts[i]`; params differ in max_tokens at most,
    owners in the number of public tokens.

    `logprobs` and `prompt_logprobs` are how many alternatives to report per token (None: no logprobs). `score_only` (max_tokens 0 with
    echo or prompt_logprobs): the engine draws one token, which isn't shown.
    """

    request_id: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    owners: Sequence[RequestOwner]
    seed: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    score_only: bool
    return_token_ids: bool
    tokens_as_ids: bool
    dropped: tuple[str, ...]

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.params[0].n

    @property
    def num_input_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def engine_ids(self) -> list[str]:
        """The ids of the engine's requests, one per prompt."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(len(self.prompts))]

    def engine_requests(self) -> list[EngineRequest]:
        """One request per prompt; all draw with the same seed."""
        seed = self.seed % 2**64
        return [
            EngineRequest(request_id, prompt.token_ids, params, seed, owner)
            for request_id, prompt, params, owner in zip(
                self.engine_ids, self.prompts, self.params, self.owners, strict=True
            )
        ]


def check_model(fields: Fields, info: EngineInfo) -> None:
    """Raises ModelNotFoundError unless the named model (or none) is the one served."""
    model = fields.string("model")
    if model is not None and model != info.model:
        raise ModelNotFoundError(
            f"The model {shown(model)} doesn't exist here; this server has {info.model!r}.",
            "model",
            "model_not_found",
        )


async def parse_completion(
    body: dict[str, object],
    encoder: PromptEncoder,
    info: EngineInfo,
    request_id: str,
    origin: Origin,
    *,
    lenient: bool,
) -> ValidRequest:
    """`POST /v1/completions`. Raises InvalidRequestError, ModelNotFoundError."""
    values, dropped = sift(body, COMPLETION_PARAMETERS, lenient=lenient)
    fields = Fields(values)
    check_model(fields, info)
    n = _check_choices(fields)
    echo = fields.boolean("echo", False)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", 0, MAX_TOKENS)
    score_only = max_tokens == 0
    if score_only and not echo and prompt_logprobs is None:
        raise InvalidRequestError(
            "max_tokens is 0, which leaves nothing to answer without echo or prompt_logprobs.",
            "max_tokens",
        )
    asked_prompt_logprobs = prompt_logprobs
    if echo and logprobs is not None:
        asked_prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    params = _sampling_params(
        fields,
        info,
        n=n,
        max_tokens=(1 if score_only else max_tokens) or DEFAULT_COMPLETION_TOKENS,
        logprobs=logprobs,
        prompt_logprobs=asked_prompt_logprobs,
    )
    prompts = await encoder.completion(
        fields.get("prompt"),
        add_special_tokens=fields.boolean("add_special_tokens", True),
        max_prompts=MAX_PROMPTS,
    )
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n = {n} is {len(prompts) * n} choices, at most {MAX_CHOICES} are given.",
            "n",
        )
    default = DEFAULT_COMPLETION_TOKENS
    fitted = [
        _fit(params, "prompt", prompt, encoder, origin.caller, max_tokens, default)
        for prompt in prompts
    ]
    return _valid_request(
        fields, request_id, origin, prompts, fitted, dropped, lenient, echo, logprobs, score_only
    )


async def parse_chat(
    body: dict[str, object],
    encoder: PromptEncoder,
    info: EngineInfo,
    request_id: str,
    origin: Origin,
    *,
    lenient: bool,
) -> ValidRequest:
    """`POST /v1/chat/completions`. Raises InvalidRequestError, ModelNotFoundError."""
    values, dropped = sift(body, CHAT_PARAMETERS, lenient=lenient)
    fields = Fields(values)
    check_model(fields, info)
    n = _check_choices(fields)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    report = fields.boolean("logprobs", False)
    if top_logprobs and not report:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", "top_logprobs")
    logprobs = (top_logprobs or 0) if report else None
    max_tokens = _chat_max_tokens(fields)
    params = _sampling_params(
        fields,
        info,
        n=n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
    )
    prompt = await encode_chat(fields, encoder)
    fitted = [_fit(params, "messages", prompt, encoder, origin.caller, max_tokens, None)]
    return _valid_request(
        fields, request_id, origin, [prompt], fitted, dropped, lenient, False, logprobs, False
    )


async def encode_chat(
    fields: Fields, encoder: PromptEncoder, *, check_length: bool = True
) -> Prompt:
    """The prompt of a request with messages (chat, or tokenize)."""
    continues = fields.boolean("continue_final_message", False)
    return await encoder.chat(
        fields.get("messages"),
        add_generation_prompt=fields.boolean("add_generation_prompt", not continues),
        continue_final_message=continues,
        template_kwargs=fields.object("chat_template_kwargs"),
        check_length=check_length,
    )


def _check_choices(fields: Fields) -> int:
    n = fields.integer_or("n", 1, 1, MAX_N)
    best_of = fields.integer("best_of", 1, MAX_N)
    if best_of is not None and best_of != n:
        raise InvalidRequestError(
            f"best_of is {best_of} with n = {n}; ranking isn't supported, only best_of equal to n.",
            "best_of",
            "unsupported_parameter",
        )
    return n


def _chat_max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, MAX_TOKENS)
    new = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_completion_tokens is {new} and max_tokens is {old}; send one of them.",
            "max_completion_tokens",
        )
    return old if new is None else new


def _check_logprob_entries(prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Logprobs of long prompts, times their width, times hundreds of prompts would fill the memory."""
    num_entries = 0
    for prompt, asked in zip(prompts, params, strict=True):
        if asked.prompt_logprobs is not None:
            num_entries += len(prompt.token_ids) * (1 + asked.prompt_logprobs)
        if asked.logprobs is not None:
            num_entries += asked.n * (asked.max_tokens or 0) * (1 + asked.logprobs)
    if num_entries > MAX_LOGPROB_ENTRIES:
        raise InvalidRequestError(
            f"The logprobs of this request may hold {num_entries} entries, at most {MAX_LOGPROB_ENTRIES} are "
            "reported; ask for fewer prompts, choices, tokens or alternatives.",
            "logprobs",
        )


def _sampling_params(
    fields: Fields,
    info: EngineInfo,
    *,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    params = SamplingParams(
        n=n,
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer_or("top_k", 0, -1, MAX_TOKENS),
        min_p=fields.number("min_p", 0.0),
        seed=fields.integer("seed", -(2**63), 2**64 - 1),
        stop=fields.strings("stop", or_one=True),
        stop_token_ids=fields.token_ids("stop_token_ids", info.vocab_size) or (),
        ignore_eos=fields.boolean("ignore_eos", False),
        max_tokens=max_tokens,
        min_tokens=fields.integer_or("min_tokens", 0, 0, MAX_TOKENS),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        logit_bias=_logit_bias(fields),
        allowed_token_ids=fields.token_ids("allowed_token_ids", info.vocab_size),
        bad_words=fields.strings("bad_words"),
        speculative=_speculative(fields),
    )
    params.check_vocabulary(info.vocab_size)
    return params


def _speculative(fields: Fields) -> dict[str, object] | Literal[False] | None:
    """Its fields are checked by `core.speculation`."""
    return False if fields.get("speculative") is False else fields.object("speculative")


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    given = fields.object("logit_bias")
    if not given:
        return None
    bias: dict[int, float] = {}
    for key, value in given.items():
        canonical = key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0")
        if not canonical or len(key) > 10:
            raise InvalidRequestError(
                f"logit_bias has the key {shown(key)}, expected a token id.", "logit_bias"
            )
        bias[int(key)] = check_number("logit_bias", value)
    return bias


def _fit(
    params: SamplingParams,
    name: str,
    prompt: Prompt,
    encoder: PromptEncoder,
    caller: Caller,
    asked: int | None,
    default: int | None,
) -> SamplingParams:
    """Settles max_tokens for a prompt: what was asked must fit, a default gives way."""
    num_prompt_tokens = len(prompt.token_ids)
    left = encoder.context - num_prompt_tokens
    _check_limits(caller, name, num_prompt_tokens, asked)
    if asked is None:
        most = caller.limits.max_output_tokens
        wanted = min(left if size is None else size for size in (left, default, most))
        if params.min_tokens > wanted:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but max_tokens is {wanted} by default here.",
                "min_tokens",
            )
        return replace(params, max_tokens=wanted)
    if asked > left:
        raise InvalidRequestError(
            f"max_tokens is {asked} and the prompt has {num_prompt_tokens} tokens, together "
            f"{asked + num_prompt_tokens}; this server takes at most {encoder.context} in one request.",
            "max_tokens",
            "context_length_exceeded",
        )
    return params


def _check_limits(caller: Caller, name: str, num_prompt_tokens: int, asked: int | None) -> None:
    """Refuses what is more than the caller may ever ask for."""
    for param, what, size, most in (
        (name, "prompt tokens", num_prompt_tokens, caller.limits.max_input_tokens),
        ("max_tokens", "output tokens", asked or 0, caller.limits.max_output_tokens),
    ):
        if most is not None and size > most:
            raise InvalidRequestError(
                f"{param} asks for {size} {what}, {caller.name} may have {most} in one request.",
                param,
                "tenant_limit_exceeded",
            )


def _valid_request(
    fields: Fields,
    request_id: str,
    origin: Origin,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    dropped: tuple[str, ...],
    lenient: bool,
    echo: bool,
    logprobs: int | None,
    score_only: bool,
) -> ValidRequest:
    _check_logprob_entries(prompts, params)
    stream = fields.boolean("stream", False)
    if "stream_options" in fields and not stream:
        raise InvalidRequestError("stream_options needs stream: true.", "stream_options")
    options = fields.object("stream_options") or {}
    known, more = sift(options, STREAM_OPTIONS, lenient=lenient, prefix="stream_options.")
    usage = {name: _option(name, known) for name in ("include_usage", "continuous_usage_stats")}
    if usage["continuous_usage_stats"] and not usage["include_usage"]:
        raise InvalidRequestError(
            "stream_options.continuous_usage_stats needs include_usage: true.", "stream_options"
        )
    if stream and "prompt_logprobs" in fields:
        raise InvalidRequestError(
            "prompt_logprobs aren't given in a stream; send stream: false.", "prompt_logprobs"
        )
    seed = params[0].seed
    owner, public = origin.owner(fields), origin.public_prefix
    return ValidRequest(
        request_id=request_id,
        prompts=prompts,
        params=params,
        owners=[
            replace(owner, num_public_tokens=public.num_public_tokens(prompt.token_ids))
            for prompt in prompts
        ],
        seed=secrets.randbits(SEED_BITS) if seed is None else seed,
        stream=stream,
        include_usage=usage["include_usage"],
        continuous_usage=usage["continuous_usage_stats"],
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
        score_only=score_only,
        return_token_ids=fields.boolean("return_token_ids", False),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids", False),
        dropped=(*dropped, *(f"stream_options.{name}" for name in more)),
    )


def _option(name: str, known: dict[str, object]) -> bool:
    value = known.get(name, False)
    if not isinstance(value, bool):
        raise wrong_type(f"stream_options.{name}", value, "true or false")
    return value
