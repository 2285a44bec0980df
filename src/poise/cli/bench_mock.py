"""`poise bench mock`: a server with a known schedule, to hold a load generator against."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from poise.bench.mock_schedule import MockProfile


@click.command("mock")
@click.option("--port", default=8090, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--profile",
    default="steady",
    show_default=True,
    metavar="NAME|FILE",
    help="A named profile, or a .toml or .json file of one.",
)
@click.option("--list", "list_profiles", is_flag=True, help="Show the named profiles and leave.")
def command(port: int, profile: str, list_profiles: bool) -> None:
    """Serve answers on 127.0.0.1 that follow an exactly known schedule.

    A request may change its own schedule with a field `mock`, for example {"mock": {"first_token_s": 0.2}}. GET
    /mock/served tells what was really done and when, on the clock of time.perf_counter.
    """
    import uvloop

    from poise.bench.mock_profiles import PROFILES, load_profile

    if list_profiles:
        for name, known in PROFILES.items():
            click.echo(f"{name:<18} {known.description}")
        return
    chosen = load_profile(profile)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(port, profile, chosen))


async def _serve(port: int, name: str, profile: MockProfile) -> None:
    from poise.bench.mock_server import MockServer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with MockServer(profile, port) as mock:
        click.echo(f"mock {name}: {profile.description}")
        click.echo(f"serving {mock.url}/v1; Ctrl-C ends it")
        await stop.wait()
    click.echo(f"answered {mock.num_arrived} requests")
