"""Checks that no tenant learns from the prefix cache what another one sent: by content, by time, by a collision.

Each is a function over `Trials`, like those of `verify/checks.py`. Invariant: each also shows that the tenant himself
does find his prefixes, so that a cache that finds nothing passes no check.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from unittest.mock import patch

from poise.core import block_hash
from poise.core.block_hash import DIGEST_BYTES, BlockHasher, CacheIdentity
from poise.core.prefix_cache import PrefixCache
from poise.core.request import RequestOwner
from poise.core.sampling_params import SamplingParams
from poise.core.tenant import Tenant, TenantTable
from poise.engine.secret import LocalSecret, fresh_secret
from poise.errors import ConfigError
from poise.verify.answers import Answer, Probe
from poise.verify.checks import Axes, Check
from poise.verify.probes import LONGEST_BLOCK
from poise.verify.rig import Run, Setup, WatchedEngine
from poise.verify.trials import Trials

VICTIM, STRANGER = "victim", "stranger"
CACHED = Setup(prefix_caching=True)
NUM_TIMED = 24  # prompts of each kind
TIMED_LENGTH = 2 * LONGEST_BLOCK
FAIR_AUC = (0.2, 0.8)  # 3.6 standard errors about a half, for two times 24 samples
SEEN_AUC = 0.9  # of the control: times that clearly tell what was cached


class Town:
    """Owners of requests as the edge makes them, under one secret."""

    def __init__(self) -> None:
        self.secret: LocalSecret = fresh_secret()

    def owner(self, tenant: str, asked: str | None = None, num_public: int = 0) -> RequestOwner:
        salt = self.secret.cache_salt(tenant, asked)
        return RequestOwner(tenant, cache_salt=salt, num_public_tokens=num_public)


def others(trials: Trials, axes: Axes) -> None:
    """What one tenant has sent changes neither another's answers nor the work that they take."""
    probes, town = trials.lab.probes, Town()
    victim, stranger = town.owner(VICTIM), town.owner(STRANGER)
    cold = trials.lab.rig.engine(CACHED).run(probes, owner=stranger)
    engine = trials.lab.rig.engine(CACHED)
    engine.run(probes, owner=victim)
    again = engine.run(probes, owner=victim)
    trials.fired("tokens that the victim found again", again.num_cached_tokens)
    after = engine.run(probes, owner=stranger)
    _same_work(trials, "a stranger after the victim", probes, cold, after)
    own = engine.run(probes, owner=stranger)
    trials.fired("tokens that the stranger found again", own.num_cached_tokens)
    trials.compare("the stranger again", str(CACHED), probes, own.answers)
    _same_work(trials, "the stranger's second time", probes, again, own)


def _same_work(trials: Trials, varied: str, probes: Sequence[Probe], cold: Run, here: Run) -> None:
    """The answers of each alone, and no token more or less computed than in `cold`."""
    setup = str(CACHED)
    trials.compare(varied, setup, probes, here.answers)
    for probe, expected, actual in zip(probes, cold.cached_tokens, here.cached_tokens, strict=True):
        trials.expect(varied, setup, "cached tokens", expected, actual, [probe])
    trials.expect(
        varied, setup, "computed tokens", cold.num_computed_tokens, here.num_computed_tokens, probes
    )


def salts(trials: Trials, axes: Axes) -> None:
    """A client's salt narrows the sharing within its tenant; no word of a client widens it."""
    probes, town = trials.lab.probes, Town()
    engine = trials.lab.rig.engine(CACHED)
    cold = engine.run(probes, owner=town.owner(VICTIM))
    for tenant, asked in (
        (VICTIM, "x"), (STRANGER, "x"), (STRANGER, VICTIM), (VICTIM, STRANGER), (STRANGER, None),
    ):  # fmt: skip
        varied = tenant if asked is None else f"{tenant} asks for {asked}"
        owner = town.owner(tenant, asked)
        _same_work(trials, varied, probes, cold, engine.run(probes, owner=owner))
        trials.fired(
            "tokens found again under each salt", engine.run(probes, owner=owner).num_cached_tokens
        )


def public(trials: Trials, axes: Axes) -> None:
    """A named public prefix is everybody's up to its last whole block, and nothing behind it is."""
    probe = _long_probe(trials)
    if probe is None:
        return
    town, size = Town(), trials.lab.rig.base.block_size
    for num_public in (LONGEST_BLOCK + 5, LONGEST_BLOCK, size - 1):
        shared = num_public // size * size
        engine = trials.lab.rig.engine(CACHED)
        setup = f"{CACHED}, {num_public} public tokens"
        for varied, tenant, expected in (
            ("the first", VICTIM, 0),
            ("a stranger", STRANGER, shared),
            ("a third", "third", shared),
            ("the first again", VICTIM, _longest_hit(probe, size)),
        ):
            run = engine.run([probe], owner=town.owner(tenant, num_public=num_public))
            trials.compare(varied, setup, [probe], run.answers)
            trials.expect(varied, setup, "cached tokens", expected, run.num_cached_tokens, [probe])
        trials.fired("public tokens shared", 2 * shared)
        trials.fired("private tokens behind them", len(probe.token_ids) - shared)


def _long_probe(trials: Trials) -> Probe | None:
    """A prompt of several blocks whose prefix can be found; without one the check has nothing to try."""
    for probe in trials.lab.probes:
        usual = probe.params.n == 1 and probe.params.prompt_logprobs is None
        if usual and len(probe.token_ids) > 2 * LONGEST_BLOCK:
            return probe
    trials.outcome.not_here = f"no prompt of more than {2 * LONGEST_BLOCK} tokens fits this context"
    return None


def _longest_hit(probe: Probe, size: int) -> int:
    return (len(probe.token_ids) - 1) // size * size


def identity(trials: Trials, axes: Axes) -> None:
    """Every field of a block's identity counts by itself, and none can pass for a part of another."""
    size, town = trials.lab.rig.base.block_size, Town()
    tokens = list(range(2 * size))
    base = CacheIdentity("model", "arithmetic", "kv", "rope", "windows", "adapter")
    names: dict[bytes, str] = {}

    def add(what: str, identity: CacheIdentity, salt: bytes, token_ids: Sequence[int]) -> None:
        hashes: list[bytes] = []
        key = town.secret.block_key
        BlockHasher(key=key, identity=identity.encode(), block_size=size).extend(
            hashes, token_ids, salt, 0
        )
        for name in hashes:
            trials.expect(what, "block hashes", f"same name as {what}", None, names.get(name))
            names[name] = what

    add("nothing", base, b"", tokens)
    for salt in (
        b"salt",
        b"adapter",
        town.owner(VICTIM).cache_salt,
        town.owner(STRANGER).cache_salt,
    ):
        add("salt", base, salt, tokens)
        trials.fired("salts", 1)
    changes = [{field.name: getattr(base, field.name) + "x"} for field in fields(base)]
    for one, other in pairwise(field.name for field in fields(base)):
        joined = getattr(base, one) + getattr(base, other)
        changes += [{one: joined, other: ""}, {one: "", other: joined}]
        changes.append({one: getattr(base, other), other: getattr(base, one)})
    changes.append({"adapter": base.adapter + "salt"})
    for change in changes:
        add(" and ".join(change), replace(base, **change), b"", tokens)
        trials.fired("changes of a field", 1)
    add("tokens", base, b"", [1, *tokens[1:]])
    add("order of tokens", base, b"", tokens[::-1])
    trials.fired("changes of tokens", 2)
    _no_shift_between_tokens_and_salt(trials)


def _no_shift_between_tokens_and_salt(trials: Trials) -> None:
    parent, text = bytes(DIGEST_BYTES), b"0123456789abcdef"
    preimages: dict[bytes, int] = {}
    for cut in range(len(text) + 1):
        named = block_hash.block_fields(parent, text[:cut], text[cut:])
        preimage = block_hash.encode_fields(named)
        what = "border of tokens and salt"
        trials.expect(what, "preimages", f"same as a cut at {cut}", None, preimages.get(preimage))
        preimages[preimage] = cut
        trials.fired("borders between fields", 1)


def collision(trials: Trials, axes: Axes) -> None:
    """Were all blocks to have one hash, neither another prompt's block nor another tenant's would be taken for it."""
    probe = _long_probe(trials)
    if probe is None:
        return
    town = Town()
    victim, stranger = town.owner(VICTIM), town.owner(STRANGER)
    same = [other for other in trials.lab.probes if len(other.token_ids) > LONGEST_BLOCK // 2]
    with _one_hash_for_all(), _counting_mismatches() as num_mismatches:
        engine = trials.lab.rig.engine(CACHED)
        engine.run([probe], owner=victim)
        control = engine.run([probe], owner=victim)
        trials.fired("tokens that the victim found again", control.num_cached_tokens)
        for varied, owner in (("a stranger", stranger), ("the victim", victim)):
            run = engine.run(same, owner=owner)
            trials.compare(f"{varied}, other prompts", str(CACHED), same, run.answers)
        run = engine.run([probe], owner=stranger)
        trials.expect(
            "a stranger, the same prompt",
            str(CACHED),
            "cached tokens",
            0,
            run.num_cached_tokens,
            [probe],
        )
        trials.fired("lookups that met a foreign block", len(num_mismatches))


@contextmanager
def _one_hash_for_all() -> Iterator[None]:
    with patch.object(BlockHasher, "digest", lambda self, *named: bytes(DIGEST_BYTES)):
        yield


@contextmanager
def _counting_mismatches() -> Iterator[list[int]]:
    """One entry for each lookup whose hash is known, but not for that block."""
    original = PrefixCache.find
    found: list[int] = []

    def find(
        self: PrefixCache,
        group: int,
        name: bytes,
        token_ids: Sequence[int],
        salt: bytes | None = None,
    ) -> int | None:
        result = original(self, group, name, token_ids, salt)
        known = self._block_by_hash[group].get(name)
        if known is not None:
            entry = self._entry_by_block[known]
            if (entry.token_ids, entry.salt) != (tuple(token_ids), salt):
                found.append(known)
        return result

    with patch.object(PrefixCache, "find", find):
        yield found


def flood(trials: Trials, axes: Axes) -> None:
    """A tenant that floods the cache loses his own prefixes, not those that are another's share."""
    probe = _long_probe(trials)
    if probe is None:
        return
    rig, town = trials.lab.rig, Town()
    num_blocks = 4 * rig.blocks_for([probe], rig.base)
    setup = replace(CACHED, num_blocks=num_blocks)
    engine = rig.engine(setup)
    half = {name: Tenant(name, kv_quota=0.5) for name in (VICTIM, STRANGER)}
    engine.engine.set_tenants(TenantTable(half))
    expected = _longest_hit(probe, rig.base.block_size)
    engine.run([probe], owner=town.owner(VICTIM))
    fitting = [
        other for other in trials.lab.probes if 2 * rig.blocks_for([other], rig.base) <= num_blocks
    ]
    num_taken = _flood(trials, engine, fitting, town, at_least=4 * num_blocks)
    trials.fired("pages that the flood took, as times the pool", num_taken // num_blocks)
    run = engine.run([probe], owner=town.owner(VICTIM))
    trials.compare("the victim after a flood", str(setup), [probe], run.answers)
    trials.expect(
        "the victim after a flood",
        str(setup),
        "cached tokens",
        expected,
        run.num_cached_tokens,
        [probe],
    )
    first = engine.run(fitting[:1], owner=town.owner(STRANGER, "0-0"))
    trials.expect("the flood's own first", str(setup), "cached tokens", 0, first.num_cached_tokens)


def _flood(
    trials: Trials, engine: WatchedEngine, probes: Sequence[Probe], town: Town, at_least: int
) -> int:
    """Requests of the stranger, none of which finds anything, until that many pages were taken."""
    asked, answers, num_taken = list[Probe](), list[Answer | None](), 0
    while num_taken < at_least:
        for index, probe in enumerate(probes):
            owner = town.owner(STRANGER, f"{len(asked) // len(probes)}-{index}")
            answers += engine.run([probe], owner=owner).answers
            asked.append(probe)
            num_taken += trials.lab.rig.blocks_for([probe], trials.lab.rig.base)
    trials.compare("the flood itself", str(CACHED), asked, answers)
    return num_taken


def timing(trials: Trials, axes: Axes) -> None:
    """By his own time to the first token a stranger can't tell what the victim has sent; the victim can."""
    rig, town = trials.lab.rig, Town()
    engine = rig.engine(CACHED)
    vocabulary, chance = rig.base.vocab_size, random.Random(5)
    victim, stranger = town.owner(VICTIM), town.owner(STRANGER)
    length = min(TIMED_LENGTH, rig.base.max_model_len - 2)
    prompts = [
        tuple(chance.randrange(vocabulary) for _ in range(length)) for _ in range(3 * NUM_TIMED)
    ]
    sent, unsent, own = (prompts[i::3] for i in range(3))
    for prompt in (*sent, *own):
        _first_token_seconds(engine, prompt, victim)
    seconds: dict[str, list[float]] = {"sent": [], "unsent": [], "own": []}
    order = [("sent", p, stranger) for p in sent]
    order += [("unsent", p, stranger) for p in unsent] + [("own", p, victim) for p in own]
    chance.shuffle(order)
    for kind, prompt, owner in order:
        seconds[kind].append(_first_token_seconds(engine, prompt, owner))
    low, high = FAIR_AUC
    foreign = auc(seconds["sent"], seconds["unsent"])
    control = auc(seconds["own"], seconds["unsent"])
    for varied, where, right, actual in (
        ("what another has sent", f"told apart by time, {low:g} to {high:g}", low <= foreign <= high, foreign),
        ("what oneself has sent", f"told apart by time, at least {SEEN_AUC:g}", control >= SEEN_AUC, control),
    ):  # fmt: skip
        trials.expect(
            varied,
            f"{NUM_TIMED} prompts of {length} tokens of each kind",
            where,
            "within",
            "within" if right else f"{actual:.2f}",
        )
        trials.fired(f"{varied}: of 100 pairs told apart", round(100 * actual) or 1)
    trials.fired("prompts timed", len(order))


def auc(faster: Sequence[float], slower: Sequence[float]) -> float:
    """How often one of `faster` is below one of `slower` (ties count half): a half if time tells nothing (Mann-Whitney)."""
    wins = sum((a < b) + 0.5 * (a == b) for a in faster for b in slower)
    return wins / (len(faster) * len(slower))


def _first_token_seconds(
    engine: WatchedEngine, prompt: tuple[int, ...], owner: RequestOwner
) -> float:
    probe = Probe("timed", prompt, SamplingParams(temperature=0.0, max_tokens=1), seed=0)
    begin = time.perf_counter()
    engine.run([probe], owner=owner)
    return time.perf_counter() - begin


ISOLATION_CHECKS: tuple[Check, ...] = (
    Check("others", "tenant", "what another tenant has cached", others),
    Check("salts", "tenant", "cache_salt of the client", salts),
    Check("public", "tenant", "a public prefix, and what follows it", public),
    Check("identity", "block", "one field of a block's identity at a time", identity),
    Check("collision", "block", "every block under one hash", collision),
    Check("flood", "share", "another tenant's flood of the cache", flood),
    Check("timing", "time", "what was sent, guessed by time to first token", timing),
)


def isolation_checks_named(names: Sequence[str]) -> list[Check]:
    """These checks in their usual order, all where none is named. Raises ConfigError for an unknown name."""
    known = [check.name for check in ISOLATION_CHECKS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--check {name}: no such check; known: {', '.join(known)}")
    return [check for check in ISOLATION_CHECKS if not names or check.name in names]
