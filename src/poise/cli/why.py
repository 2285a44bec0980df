"""`poise why ID`: asks a running server where a request's time went."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from poise.errors import PoiseError

if TYPE_CHECKING:
    from rich.console import Console

TIMEOUT_SECONDS = 10
WHAT = {
    "waiting": "waited in the queue",
    "prompt": "computed its prompt",
    "output": "drew its answer",
    "waiting_again": "waited after preemptions",
    "recomputing": "recomputed what they dropped",
}
CAUSES = {
    "step": "a step that was running",
    "sequences": "a place among those running",
    "tokens": "room in a step",
    "kv_blocks": "KV blocks",
    "cohort": "the batch before it",
    "partial_prefills": "prompts half computed",
    "preemption": "a step in which others were preempted",
}
HIDDEN = ("time", "seconds", "kind", "choice")


@click.command("why")
@click.argument("request_id", metavar="ID")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="POISE_API_KEY",
    help="The key that the request was sent with.",
)
@click.option("--json", "as_json", is_flag=True, help="The server's answer as it is.")
def command(request_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Tell where the time of request ID went.

    ID is the answer's id or an X-Request-Id. Only requests of the key's own tenant are found, running or among the last
    1,000 that ended.
    """
    answer = fetch(f"{url.rstrip('/')}/v1/requests/{quote(request_id, safe='')}", api_key)
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    print_request(answer, console)


def fetch(address: str, api_key: str | None) -> dict[str, Any]:
    """The JSON object at an address. Raises PoiseError in one line."""
    import asyncio

    import aiohttp

    async def get() -> dict[str, Any]:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            async with session.get(address) as response:
                body = await response.json()
            if response.status != 200:
                raise PoiseError(body["error"]["message"])
            answer: dict[str, Any] = body
            return answer

    try:
        return asyncio.run(get())
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        raise PoiseError(
            f"{address} gives no answer of poise's: {error or type(error).__name__}"
        ) from None


def print_request(answer: dict[str, Any], console: Console) -> None:
    """Per prompt: a line for each choice's times, and its events as a table."""
    from rich.table import Table

    console.print(f"{answer['id']}, {answer['status']}", highlight=False)
    several = len(answer["prompts"]) > 1
    for number, prompt in enumerate(answer["prompts"]):
        if several:
            console.print(f"prompt {number}", highlight=False)
        for times in prompt["choices"]:
            console.print(summary(times), highlight=False)
        table = Table("s", "choice", "what", "", box=None, pad_edge=False)
        table.columns[0].justify = "right"
        for event in prompt["events"]:
            told = ", ".join(f"{k} {_shown(v)}" for k, v in event.items() if k not in HIDDEN)
            table.add_row(f"{event['seconds']:.3f}", str(event["choice"]), event["kind"], told)
        console.print(table)


def summary(times: dict[str, Any]) -> str:
    """Where one choice's time went, in a line."""
    parts = []
    for what, seconds in times["seconds"].items():
        part = f"{seconds:.3f} s {WHAT.get(what, what)}"
        waited = {cause: s for cause, s in times["waited_for"].items() if s >= 0.0005}
        if what == "waiting" and waited:
            causes = sorted(waited.items(), key=lambda item: -item[1])
            part += f" (for {', '.join(f'{CAUSES.get(c, c)} {s:.3f}' for c, s in causes)})"
        parts.append(part)
    total = sum(times["seconds"].values())
    line = f"choice {times['index']}: {total:.3f} s, of these {'; '.join(parts)}"
    if times["cached_tokens"]:
        line += f"; {times['cached_tokens']} prompt tokens were cached"
    if times["drafted_tokens"]:
        line += f"; {times['accepted_tokens']} of {times['drafted_tokens']} drafted tokens accepted"
    if times["num_preemptions"]:
        line += f"; preempted {times['num_preemptions']} times"
    if times["finish_reason"] is not None:
        line += f"; ended by {times['finish_reason']}"
    return line


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return " ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "nothing"
    return str(value)
