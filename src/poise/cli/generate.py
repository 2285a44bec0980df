"""`poise generate`: continues one prompt and prints the text as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import SystemRandom
from typing import Any

import click

from poise.cli.options import Verb, settings_options
from poise.config import (
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    Settings,
    SpeculationConfig,
)
from poise.errors import PoiseError

DEFAULT_MAX_TOKENS = 128


def sampling_options(max_tokens: int | None, temperature: float) -> Callable[[Verb], Verb]:
    """The sampling flags of `generate` and `chat`, under the API's names."""
    options = [
        click.option("--max-tokens", type=int, default=max_tokens, show_default=True),
        click.option("--temperature", type=float, default=temperature, show_default=True),
        click.option("--top-p", type=float, default=1.0, show_default=True),
        click.option("--top-k", type=int, default=0, help="0 is off."),
        click.option("--min-p", type=float, default=0.0, help="0 is off."),
        click.option("--stop", multiple=True, help="End before this text; may be given again."),
        click.option("--seed", type=int, help="Without one a seed is drawn and shown."),
    ]

    def decorate(verb: Verb) -> Verb:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return decorate


@click.command("generate")
@click.argument("prompt")
@settings_options(ModelSource, CacheConfig, SchedulerConfig, ComputeConfig, SpeculationConfig)
@sampling_options(DEFAULT_MAX_TOKENS, 1.0)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message in a chat.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: text, ids, seed, …")
def command(settings: Settings, prompt: str, chat: bool, as_json: bool, **sampling: Any) -> int:
    """Continue PROMPT; "-" reads it from standard input."""
    from poise.cli.local_engine import AnswerStoppedError, load_local_engine, printable, stream
    from poise.core.sampling_params import SamplingParams
    from poise.engine.input_processor import resolve_seed

    params = SamplingParams(**sampling)
    if prompt == "-":
        prompt = sys.stdin.read()
    engine = load_local_engine(settings)
    try:
        tokenizer = engine.tokenizer
        if chat:
            token_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            token_ids = tokenizer.encode(prompt, add_special_tokens=True)
        seed = resolve_seed(params.seed, SystemRandom())
        on_terminal = sys.stdout.isatty()
        texts: list[str] = []
        answer_ids: list[int] = []
        reason = stop_reason = None
        try:
            for delta in stream(engine, token_ids, params, seed):
                for choice in delta.choices:
                    texts.append(choice.text)
                    answer_ids.extend(choice.token_ids)
                    reason = choice.finish_reason or reason
                    stop_reason = choice.stop_reason
                    if not as_json:
                        click.echo(printable(choice.text) if on_terminal else choice.text, nl=False)
        except AnswerStoppedError:
            click.echo()
            return 130
        if reason == "error":
            raise PoiseError(f"the answer broke off: {stop_reason}")
        if as_json:
            _print_json(
                model=engine.info.model,
                text="".join(texts),
                prompt_token_ids=list(token_ids),
                token_ids=answer_ids,
                finish_reason=reason,
                seed=seed,
                system_fingerprint=engine.info.system_fingerprint,
            )
        else:
            click.echo()
            if on_terminal and not params.greedy and params.seed is None:
                click.secho(f"(--seed {seed} gives this answer again)", dim=True, err=True)
    finally:
        engine.close()
    return 0


def _print_json(**record: object) -> None:
    import json

    click.echo(json.dumps(record, ensure_ascii=False))
