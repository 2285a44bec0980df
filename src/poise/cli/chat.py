"""`poise chat`: a conversation in the terminal.

Owns the conversation and the reading of messages. Invariant: Ctrl-C during an answer keeps the session, and a message that
could not be answered is not part of the conversation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import click

from poise.cli.generate import sampling_options
from poise.cli.options import model_argument, settings_options
from poise.config import (
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    Settings,
    SpeculationConfig,
)
from poise.errors import InvalidRequestError

if TYPE_CHECKING:
    from poise.core.sampling_params import SamplingParams
    from poise.engine.llm_engine import LLMEngine

HELP = """\
/help            this list
/reset           forget the conversation
/system TEXT     set the system message and forget the conversation; without TEXT remove it
/seed [NUMBER]   use this seed from now on; without NUMBER draw a new one for each answer
A line ending in \\ goes on; \"\"\" begins and ends a message of several lines.
Ctrl-C stops an answer; at the prompt twice, or Ctrl-D once, it leaves."""


@click.command("chat")
@model_argument
@settings_options(ModelSource, CacheConfig, SchedulerConfig, ComputeConfig, SpeculationConfig)
@sampling_options(None, 0.7)
@click.option("--system", metavar="TEXT", help="The system message.")
def command(settings: Settings, system: str | None, **sampling: Any) -> int:
    """Talk with MODEL in the terminal."""
    from poise.cli.local_engine import load_local_engine
    from poise.core.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    engine = load_local_engine(settings)
    try:
        conversation = Conversation(engine, params, system)
        if sys.stdin.isatty():
            click.secho(
                f"{engine.info.model}, {engine.info.max_model_len:,} tokens of context. /help",
                dim=True,
            )
        run_session(conversation)
    finally:
        engine.close()
    return 0


class Conversation:
    """Messages so far and how to answer the next one."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def set_system(self, text: str | None) -> None:
        self._system = text
        self.reset()

    def set_seed(self, seed: int | None) -> None:
        """Raises InvalidRequestError if it is out of range."""
        self._params = replace(self._params, seed=seed)

    def answer(self, text: str) -> None:
        """Prints the answer as it comes and remembers both sides."""
        from poise.cli.local_engine import AnswerStoppedError, printable, stream
        from poise.engine.input_processor import resolve_seed

        messages = [*self._messages, {"role": "user", "content": text}]
        token_ids = self._engine.tokenizer.encode_chat(messages)
        params = self._params
        seed = resolve_seed(params.seed, SystemRandom())
        said: list[str] = []
        note = None
        try:
            for delta in stream(self._engine, token_ids, params, seed):
                for choice in delta.choices:
                    said.append(choice.text)
                    click.echo(printable(choice.text), nl=False)
                    if choice.finish_reason == "length":
                        note = "the answer was cut: no room is left; /reset begins anew"
                        if params.max_tokens is not None:
                            note = f"the answer was cut at --max-tokens {params.max_tokens}"
                    elif choice.finish_reason == "error":
                        note = f"the answer broke off: {choice.stop_reason}"
        except AnswerStoppedError:
            note = "stopped"
        click.echo()
        if note:
            click.secho(f"({note})", dim=True, err=True)
        self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]


def run_session(conversation: Conversation, read: Callable[[str], str] = input) -> None:
    """Reads and answers until the end of input; a Ctrl-C at the prompt warns, the next one leaves."""
    interrupted = False
    while True:
        try:
            message = read_message(read)
        except EOFError:
            break
        except KeyboardInterrupt:
            click.echo()
            if interrupted:
                break
            interrupted = True
            click.secho("(Ctrl-C again or Ctrl-D leaves)", dim=True)
            continue
        interrupted = False
        try:
            if message.startswith("/"):
                run_slash_command(conversation, message)
            elif message.strip():
                conversation.answer(message)
        except InvalidRequestError as error:
            click.secho(f"poise: {error}", fg="red", err=True)


def read_message(read: Callable[[str], str]) -> str:
    """One message: a line, lines joined by a trailing backslash, or a block between triple quotes."""
    ask = read if sys.stdin.isatty() or read is not input else (lambda prompt: read(""))
    line = ask("> ")
    if line.lstrip().startswith('"""'):
        return _read_block(ask, line.lstrip()[3:])
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = ask("… ")
    return "\n".join([*lines, line])


def _read_block(ask: Callable[[str], str], line: str) -> str:
    lines = []
    while not line.rstrip().endswith('"""'):
        lines.append(line)
        line = ask("… ")
    lines.append(line.rstrip()[:-3])
    return "\n".join(lines).strip("\n")


def run_slash_command(conversation: Conversation, line: str) -> None:
    """/help, /reset, /system, /seed; an unknown one says so."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/help":
        click.echo(HELP)
    elif name == "/reset":
        conversation.reset()
        click.secho("(the conversation is forgotten)", dim=True)
    elif name == "/system":
        conversation.set_system(rest or None)
        click.secho(f"(system message {'set' if rest else 'removed'}; begun anew)", dim=True)
    elif name == "/seed":
        if rest and not rest.removeprefix("-").isdecimal():
            raise InvalidRequestError(f"/seed {rest}: expected a whole number", "seed")
        conversation.set_seed(int(rest) if rest else None)
        click.secho(f"(seed {rest})" if rest else "(a new seed for each answer)", dim=True)
    else:
        raise InvalidRequestError(f"{name} is not a command; /help lists them")
