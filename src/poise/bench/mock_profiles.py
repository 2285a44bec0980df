"""The mock's named profiles, one per way in which servers differ or fail, and profiles from files.

Invariant: a name's figures are fixed; tests and documents quote them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from poise.bench.mock_schedule import MockProfile, MockSchedule
from poise.errors import ConfigError


def _one(description: str, **parts: object) -> MockProfile:
    schedule = msgspec.convert(parts, MockSchedule)
    return MockProfile(description=description, schedules=(schedule,))


PROFILES: dict[str, MockProfile] = {
    "steady": _one("first token after 50 ms, then one every 10 ms"),
    "slow": _one("first token after 2 s, then one every 250 ms", first_token_s=2, gap_s=[0.25]),
    "stutter": _one("every tenth gap is 200 ms", gap_s=[*[0.01] * 9, 0.2]),
    "role-first": _one(
        "chat: an empty role chunk at 5 ms, the first token at 214 ms",
        role_at_s=0.005,
        first_token_s=0.214,
    ),
    "empty-first": _one("three empty chunks before the first token", num_empty_chunks=3),
    "reasoning-first": _one("chat: eight tokens of reasoning first", num_reasoning_tokens=8),
    "reasoning-only": _one("chat: reasoning and no answer", num_reasoning_tokens=1_000_000),
    "bundled": _one("chunks of 1, 4, 2 tokens", tokens_per_chunk=[1, 4, 2], gap_s=[0.02]),
    "missing-usage": _one("no usage at all", usage="missing"),
    "continuous-usage": _one(
        "running usage in every chunk of 1, 4, 2 tokens",
        usage="continuous",
        tokens_per_chunk=[1, 4, 2],
    ),
    "usage-in-finish": _one(
        "usage beside the finish reason, not in a chunk of its own",
        usage="finish_chunk",
        finish="own_chunk",
    ),
    "one-token": _one("a single token", num_tokens=1),
    "no-token": _one("not a single token", num_tokens=0),
    "short": _one("stops after three tokens whatever was asked", num_tokens=3),
    "cut": _one("the connection closes after four chunks", end="cut", end_after_chunks=4),
    "reset": _one("the connection is reset after four chunks", end="reset", end_after_chunks=4),
    "no-done": _one(
        "the body ends properly after four chunks, without finish reason or [DONE]",
        end="no_done",
        end_after_chunks=4,
    ),
    "stall": _one("nothing more after four chunks", end="stall", end_after_chunks=4),
    "error-event": _one(
        "HTTP 200, four chunks, then an error event", end="error_event", end_after_chunks=4
    ),
    "too-many": _one("HTTP 429", status=429, first_token_s=0.001),
    "broken": _one("HTTP 500", status=500, first_token_s=0.001),
    "flaky": MockProfile(
        description="every fourth request gets HTTP 503",
        schedules=(*[MockSchedule()] * 3, MockSchedule(status=503)),
    ),
    "not-sse": _one("one JSON object although a stream was asked", answer="json"),
    "html": _one("HTTP 200 with a page instead of an answer", answer="html"),
    "crlf": _one("lines end in CR LF", line_end="\r\n"),
    "split": _one(
        "multi-byte characters, in pieces of three bytes", token_text=" é🙂", piece_bytes=3
    ),
    "joined": _one("three events in each write", events_per_write=3),
    "heartbeats": _one(
        "a comment every 15 ms, the first token after 100 ms", heartbeat_s=0.015, first_token_s=0.1
    ),
    "big-events": _one("events of 100 kB", padding_bytes=100_000),
    "queue": MockProfile(
        description="one at a time, 500 ms each: a queue grows above two requests a second",
        schedules=(MockSchedule(first_token_s=0.4, gap_s=(0.1,), num_tokens=2),),
        slots=1,
    ),
    "prefix-cache": MockProfile(
        description="0.2 ms per prompt token that was not seen before",
        schedules=(MockSchedule(first_token_s=0.005, uncached_token_s=0.0002),),
        prefix_cache=True,
    ),
    "instant": _one(
        "everything at once and in one write, for load",
        first_token_s=0,
        gap_s=[0],
        events_per_write=1000,
    ),
}


def load_profile(name_or_path: str) -> MockProfile:
    """A named profile, or one from a TOML or JSON file. ConfigError says what is wrong with it.

    A file holds the fields of MockProfile; `schedules` is a list of tables with the fields of MockSchedule.
    """
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    if path.suffix not in (".toml", ".json"):
        known = ", ".join(PROFILES)
        raise ConfigError(f"profile {name_or_path!r} is neither a .toml or .json file nor: {known}")
    try:
        content = path.read_bytes()
        if path.suffix == ".json":
            return msgspec.json.decode(content, type=MockProfile)
        return msgspec.convert(tomllib.loads(content.decode()), MockProfile)
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"profile {path}: {error}") from None
