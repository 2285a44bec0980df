"""The checks: what is varied, and the claim that no bit of any answer moves with it.

Each is a function over `Trials`; the table at the end names them. Knows engines only through the rig.
Invariant: a check counts what it exercised, so that one that exercised nothing fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from poise.errors import ConfigError
from poise.executor.load import LoadedExecutor
from poise.kernels.cpu import available_isas, isa
from poise.kernels.ops import SPLIT
from poise.verify import law
from poise.verify.answers import Probe
from poise.verify.child import answers_under
from poise.verify.drafts import KnowingDrafter, known_answers
from poise.verify.oracle import recompute
from poise.verify.probes import (
    LONGEST_BLOCK,
    growing_first,
    history_probes,
    prefix_probes,
    short_probes,
    spread,
)
from poise.verify.rig import MAX_CONTEXT, Run, Setup, fill_pages
from poise.verify.trials import Lab, Outcome, Trials, measured

GARBAGE = 0xFF  # bf16 0xffff and float32 0xffffffff are NaN


@dataclass(frozen=True, slots=True)
class Axes:
    """How far the checks go."""

    company: tuple[int, ...]
    crowd_length: int  # the longest prompt in company
    num_orders: int
    threads: tuple[int, ...]
    primes: tuple[int, ...]  # chunk sizes beside those about a block
    stride: int  # of the probes, every how many are sent where all of them would only take time
    twin_length: int  # the longest prompt for the uncached twin
    num_slow: int  # probes for what is slow: the twin, chunks of one token
    num_isa: int  # probes for other instruction sets, of which one is very slow
    num_cut: int  # probes for each size of chunk, longest first
    behind_prefix: tuple[int, ...]  # sizes of crowds behind one prefix
    prefix_splits: int  # splits of attention that the longest prefix fills
    drafts: tuple[int, ...]  # of a request in a step
    num_growing: int  # probes that draft while pages are short


QUICK = Axes(
    company=(2, 5, 17, 64),
    crowd_length=16,
    num_orders=1,
    threads=(1, 2, 3),
    primes=(37,),
    stride=2,
    twin_length=40,
    num_slow=4,
    num_isa=3,
    num_cut=4,
    behind_prefix=(2, 9),
    prefix_splits=1,
    drafts=(1, 3),
    num_growing=8,
)
FULL = Axes(
    company=tuple(range(1, 65)),
    crowd_length=40,
    num_orders=4,
    threads=(1, 2, 3, 4, 8),
    primes=(7, 37, 113),
    stride=1,
    twin_length=MAX_CONTEXT,
    num_slow=12,
    num_isa=12,
    num_cut=64,
    behind_prefix=(2, 3, 5, 8, 17, 40, 64),
    prefix_splits=2,
    drafts=(1, 2, 3, 4, 5, 6),
    num_growing=24,
)


def repeat(trials: Trials, axes: Axes) -> None:
    probes = short_probes(trials.lab.probes)
    engine = trials.lab.rig.engine(Setup())
    once = engine.run(probes)
    again = engine.run(probes)
    trials.compare(
        "the same batch twice", str(Setup()), probes, again.answers, expected=once.answers
    )
    trials.fired("steps repeated", len(again.steps))


def company(trials: Trials, axes: Axes) -> None:
    probes = short_probes(trials.lab.probes, axes.crowd_length)
    setup = Setup(chunk=trials.lab.rig.longest_chunk)
    for size in axes.company:
        run = trials.run(f"{size}", setup, list(islice(cycle(probes), size)))
        trials.fired("crowds that met in a step", run.most_requests >= size)


def order(trials: Trials, axes: Axes) -> None:
    probes = short_probes(trials.lab.probes)
    orders = [list(reversed(probes))]
    shuffle = random.Random(1)
    for _ in range(axes.num_orders):
        orders.append(shuffle.sample(probes, len(probes)))
    for index, ordered in enumerate(orders):
        trials.run("reversed" if index == 0 else f"shuffled {index}", Setup(), ordered)
        moved = sum(one is not other for one, other in zip(probes, ordered))
        trials.fired("requests in another place", moved)


def arrivals(trials: Trials, axes: Axes) -> None:
    engine = trials.lab.rig.engine(Setup())

    def one_by_one(probes: Sequence[Probe]) -> Run:
        return engine.run(probes, arrivals=range(0, 2 * len(probes), 2))

    run = trials.run("one every other step", Setup(), trials.lab.probes, one_by_one)
    trials.fired("steps of prompts beside answers", run.num_mixed_steps)


def aborts(trials: Trials, axes: Axes) -> None:
    probes = short_probes(trials.lab.probes)
    victims = list(islice(cycle(probes), len(probes)))
    both = [probe for pair in zip(victims, probes) for probe in pair]

    def abort_every_other(chosen: Sequence[Probe]) -> Run:
        leaves = {i: 1 + i // 2 % 4 for i in range(0, len(chosen), 2)}
        return trials.lab.rig.engine(Setup()).run(chosen, aborts=leaves)

    run = abort_every_other(both)
    trials.compare("every other one leaves", str(Setup()), both, run.answers)
    trials.fired("neighbours aborted", run.num_aborted)


def preemption(trials: Trials, axes: Axes) -> None:
    rig = trials.lab.rig
    chosen = [probe for probe in trials.lab.probes if len(probe.token_ids) <= LONGEST_BLOCK]
    probes = growing_first(chosen, rig.base.block_size)
    alone = max(rig.blocks_for([probe], rig.base) for probe in probes)
    for share in (3, 2):
        blocks = max(alone, rig.blocks_for(probes, rig.base) // share)
        setup = Setup(num_blocks=blocks)
        run = trials.run(f"a pool of {blocks} blocks", setup, probes)
        trials.fired("preemptions", run.num_preemptions)


def recycled(trials: Trials, axes: Axes) -> None:
    probes = trials.lab.probes
    rig = trials.lab.rig

    def on_dirty_pages(chosen: Sequence[Probe]) -> Run:
        fill_pages(rig.base, rig.blocks_for(chosen, rig.base), GARBAGE)
        return rig.engine(Setup()).run(chosen)

    trials.run("pages full of NaN", Setup(), probes, on_dirty_pages)
    trials.fired("dirty pages", rig.blocks_for(probes, rig.base))
    fill_pages(rig.base, rig.blocks_for(probes, rig.base), 0)


def chunks(trials: Trials, axes: Axes) -> None:
    probes = trials.lab.probes
    block = trials.lab.rig.base.block_size
    run = trials.run("1", Setup(chunk=1), spread(short_probes(probes), axes.num_slow))
    trials.fired("cuts of prompts", run.num_cut)
    longest = sorted(probes, key=lambda probe: len(probe.token_ids))[-axes.num_cut :]
    for chunk in (block - 1, block, block + 1, *axes.primes):
        run = trials.run(str(chunk), Setup(chunk=chunk), longest)
        trials.fired("cuts of prompts", run.num_cut)
    run = trials.run("whole", Setup(chunk=trials.lab.rig.longest_chunk), longest)
    trials.fired("whole prompts", sum(item.samples for item in run.steps[0]))


def blocks(trials: Trials, axes: Axes) -> None:
    rig = trials.lab.rig
    for size in (16, 32, 64):
        if size == rig.settings.cache.block_size:
            continue
        loaded = loaded_afresh(trials, axes, str(size), Setup(block_size=size))
        trials.fired("other block sizes", loaded.block_size == size)


def threads(trials: Trials, axes: Axes) -> None:
    rig = trials.lab.rig
    usual = int(rig.base.details["threads"])
    for count in axes.threads:
        if count == usual:
            continue
        loaded = loaded_afresh(trials, axes, str(count), Setup(threads=count))
        trials.fired("other numbers of threads", loaded.details["threads"] == str(count))


def loaded_afresh(trials: Trials, axes: Axes, varied: str, setup: Setup) -> LoadedExecutor:
    """A trial for which the model is loaded again; returns what was loaded."""
    loaded = trials.lab.rig.load(setup)

    def run(chosen: Sequence[Probe]) -> Run:
        return trials.lab.rig.engine(setup, loaded).run(chosen)

    trials.run(varied, setup, trials.lab.probes[:: axes.stride], run)
    return loaded


def cache(trials: Trials, axes: Axes) -> None:
    setup = Setup(prefix_caching=True)

    def again(chosen: Sequence[Probe]) -> Run:
        engine = trials.lab.rig.engine(setup)
        engine.run(chosen)
        return engine.run(chosen)

    cold = trials.run("cold", setup, trials.lab.probes)
    warm = trials.run("warm", setup, trials.lab.probes, again)
    trials.fired("cached tokens", cold.num_cached_tokens + warm.num_cached_tokens)


def shared(trials: Trials, axes: Axes) -> None:
    rig = trials.lab.rig
    if rig.base.details["shared_prefix_attention"] != "on":
        trials.outcome.not_here = "each request reads a shared prefix for itself here"
        return
    for num_splits in range(1, axes.prefix_splits + 1):
        quick, vocab_size = axes is QUICK, rig.info.vocab_size
        crowd = prefix_probes(rig.tokenizer, vocab_size, num_splits=num_splits, quick=quick)
        fitting = rig.fitting(crowd)
        if len(fitting) > 1:
            crowds_behind(f"{num_splits * SPLIT}", trials, axes, fitting)
    if not trials.outcome.varied:
        trials.outcome.not_here = f"contexts of {rig.info.max_model_len} tokens hold no such prefix"


def crowds_behind(prefix: str, trials: Trials, axes: Axes, probes: Sequence[Probe]) -> None:
    """Crowds of requests with one prefix, its pages in the cache since one of them was answered."""
    rig = trials.lab.rig
    setup = Setup(chunk=rig.longest_chunk, prefix_caching=True)

    def behind_it(chosen: Sequence[Probe]) -> Run:
        engine = rig.engine(setup)
        engine.run(probes[:1])
        return engine.run(chosen)

    trials.lab.answer_alone(probes)
    for size in axes.behind_prefix:
        before = rig.base.work_done().spared_keys
        crowd = list(islice(cycle(probes), size))
        run = trials.run(f"{size} behind {prefix}", setup, crowd, behind_it)
        trials.fired("crowds that met in a step", run.most_requests >= size)
        trials.fired("keys read for another", rig.base.work_done().spared_keys - before)


def speculation(trials: Trials, axes: Axes) -> None:
    """Drafts of every length, right and wrong: with room for all, while pages are short, and with a cache."""
    rig = trials.lab.rig
    own = history_probes(rig.tokenizer, rig.info.vocab_size, quick=axes is QUICK)
    trials.lab.answer_alone(rig.fitting(own))
    probes = short_probes(trials.lab.probes, axes.crowd_length) + rig.fitting(own)
    chosen = [probe for probe in trials.lab.probes if len(probe.token_ids) <= LONGEST_BLOCK]
    growing = growing_first(chosen, rig.base.block_size)[: axes.num_growing]
    alone = max(rig.blocks_for([probe], rig.base) for probe in growing)
    few_blocks = max(alone, rig.blocks_for(growing, rig.base) // 3)
    for k in axes.drafts:
        drafted(trials, Setup(drafts=k), probes)
        drafted(trials, Setup(drafts=k, prefix_caching=True), probes)
        drafted(trials, Setup(drafts=k, chunk=rig.base.block_size + 1), growing)
        run = drafted(
            trials, Setup(drafts=k, chunk=LONGEST_BLOCK + 1, num_blocks=few_blocks), growing
        )
        trials.fired("preemptions", run.num_preemptions)
    setup = Setup(drafts=axes.drafts[-1])
    run = trials.run("drafts looked up in the text", setup, trials.lab.probes[:: axes.stride])
    trials.fired("drafts looked up", sum(item.num_drafts for step in run.steps for item in step))


def drafted(trials: Trials, setup: Setup, probes: Sequence[Probe]) -> Run:
    """A trial whose drafts are the answers, some tokens spoilt."""
    rig = trials.lab.rig
    drafter = KnowingDrafter(known_answers(probes, trials.lab.alone), rig.info.vocab_size)

    def run(chosen: Sequence[Probe]) -> Run:
        return rig.engine(setup, drafter=drafter).run(chosen)

    found = trials.run(str(setup), setup, probes, run)
    trials.fired("drafts accepted", drafter.num_accepted)
    trials.fired("drafts rejected", drafter.num_drafted - drafter.num_accepted)
    return found


def rejection(trials: Trials, axes: Axes) -> None:
    law.rejection(trials)


def twin(trials: Trials, axes: Axes) -> None:
    rig = trials.lab.rig
    probes = spread(short_probes(trials.lab.probes, axes.twin_length), axes.num_slow)
    answers = [recompute(rig.base, rig.tokenizer, probe, rig.longest_chunk) for probe in probes]
    trials.compare(
        "every step from position 0", "no scheduler, no cache", probes, answers, each_alone=True
    )
    trials.fired("tokens from a recomputed prefix", sum(answer.num_positions for answer in answers))


def variants(trials: Trials, axes: Axes) -> None:
    probes = short_probes(trials.lab.probes, LONGEST_BLOCK // 4)[-axes.num_isa :]
    others = [name for name in available_isas() if name != isa()]
    if not others:
        trials.outcome.not_here = f"this build and CPU have {isa()} only"
    for name in others:
        child = answers_under(trials.lab.rig, name, probes)
        where = f"POISE_ISA={name}, in a process of its own"
        trials.compare(name, where, probes, child.answers, each_alone=True)
        trials.fired("other instruction sets", child.isa == name)


@dataclass(frozen=True, slots=True)
class Check:
    """A named claim of a level (docs/EXACTNESS.md) and what tests it."""

    name: str
    level: str
    claim: str
    run: Callable[[Trials, Axes], None]


CHECKS: tuple[Check, ...] = (
    Check("repeat", "L0", "the same batch again", repeat),
    Check("company", "L1", "1 … 64 requests at once", company),
    Check("order", "L1", "the order of the requests", order),
    Check("arrivals", "L1", "when each arrives", arrivals),
    Check("aborts", "L1", "neighbours that leave", aborts),
    Check("preemption", "L1", "losing one's pages and coming back", preemption),
    Check("recycled", "L1", "what a page held before", recycled),
    Check("threads", "L1", "the number of threads", threads),
    Check("chunks", "L2", "how prompts are cut", chunks),
    Check("blocks", "L2", "the size of a KV block", blocks),
    Check("cache", "L2", "prefix cache cold or warm", cache),
    Check("shared", "L2", "a crowd behind one prefix, read once for all", shared),
    Check("twin", "L2", "cached decoding, against every step from position 0", twin),
    Check("speculation", "L3", "drafts, right ones and wrong ones", speculation),
    Check("rejection", "law", "the distribution that rejection keeps", rejection),
    Check("isa", "L4", "the instruction set", variants),
)


def checks_named(names: Sequence[str]) -> list[Check]:
    """These checks in their usual order, all where none is named. Raises ConfigError for an unknown name."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--check {name}: no such check; known: {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names]


def run_check(check: Check, lab: Lab, axes: Axes, *, shrink: bool) -> Outcome:
    """`shrink` looks for the smallest case of a difference."""
    outcome = Outcome(check.name, check.level, check.claim)
    with measured(outcome):
        check.run(Trials(lab, outcome, shrink), axes)
    return outcome
