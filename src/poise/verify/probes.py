"""The requests that the checks send: mixed lengths and parameters, over any tokenizer.

Knows tokens, not engines. Invariant: the same tokenizer gives the same probes; some share a prefix, and one
begins with blocks that another one has further back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from poise.core.sampling_params import SamplingParams
from poise.kernels.ops import SPLIT
from poise.tokenizer.tokenizer import Tokenizer
from poise.verify.answers import Probe

TEXT = """The harbour had been quiet for most of the winter, and nobody expected the ships to come back before
the ice broke. When the first sail stood against the grey line of the sea, the children ran to the wall
and counted: one, two, then five, and behind them something larger that had no name yet. An old man who
had kept the light for thirty-one years put down his pipe and said that he had seen such a hull once, in
the year of the great storm, when 118 boats left and 96 returned. Bread was baked twice that day. The
baker's daughter wrote the figures into a ledger: flour 40 kg, salt 2 kg, yeast 0.6 kg; whoever came would
be hungry. By evening the wind had turned to the north-east, and the captain of the leading ship, a woman
with a scar over her left eye, asked for water, for rope, and for the names of everyone who had asked after
them. "There are only seven names," said the clerk, and read them aloud. She listened to the end, thanked
him, and then, to the surprise of all who stood there, she sat down on the lowest step and laughed until
the gulls flew up from the roof of the fish hall. Later that night she told the story to anybody who would
listen: how they had followed the coast for nineteen days, how the compass had failed near the white rocks,
and how, in the end, a dog had heard the bell of this very harbour long before any of the crew did."""

LONGEST_BLOCK = 64  # block sizes divide it, so that what is aligned to it is aligned to all
QUICK_LENGTHS = (1, 2, 7, 15, 16, 17, 24, 31, 33, 40, 61)
FULL_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 20, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 97)
LONG = 2 * LONGEST_BLOCK + 10
VERY_LONG = 290  # attention splits end at 256
SHORT = 40  # of which a crowd is made
SHORT_WINDOW = 128


def build_probes(
    tokenizer: Tokenizer, vocab_size: int, *, quick: bool, windows: Sequence[int] = ()
) -> list[Probe]:
    """A list that any of the checks can draw on. `quick` sends fewer and shorter ones.

    `windows` are the model's sliding windows: each gets a prompt that reaches beyond it (not in a quick
    run, unless it is short).
    """
    reached = [window for window in windows if not quick or window <= SHORT_WINDOW]
    text = _token_ids(tokenizer, max([VERY_LONG, *reached]) + LONG)
    max_tokens = 6 if quick else 12
    prompts: list[tuple[str, list[int]]] = []
    for index, length in enumerate(QUICK_LENGTHS if quick else FULL_LENGTHS):
        begin = 0 if index % 2 else 3 * index + 1  # every other one begins as the text does
        prompts.append((f"p{index}-{length}", text[begin : begin + length]))
    prompts.append(("long", text[:LONG]))
    prompts.append(("moved", text[LONGEST_BLOCK : 2 * LONGEST_BLOCK] + text[5:15]))
    if not quick:
        prompts.append(("very-long", text[:VERY_LONG]))
        prompts.append(("sibling", text[: VERY_LONG - 20] + text[2:9]))
    prompts += [(f"window-{window}", text[2 : window + LONG]) for window in reached]
    params = islice(cycle(_parameters(max_tokens, text, vocab_size)), len(prompts))
    return [
        Probe(name, tuple(ids), chosen, seed=1000 + index)
        for index, ((name, ids), chosen) in enumerate(zip(prompts, params))
    ]


def prefix_probes(
    tokenizer: Tokenizer, vocab_size: int, *, num_splits: int, quick: bool
) -> list[Probe]:
    """A crowd behind one prefix that fills `num_splits` splits of attention, the last of it parting within the first split."""
    count = num_splits * SPLIT + LONGEST_BLOCK // 4
    text = _token_ids(tokenizer, count + LONG)
    prompts = [text[:count] + text[index : 2 * index + 2] for index in range(3 if quick else 9)]
    parting = (3,) if quick else (3, 11)
    prompts += [text[:LONGEST_BLOCK] + text[begin : begin + count] for begin in parting]
    params = islice(cycle(_parameters(4 if quick else 8, text, vocab_size)), len(prompts))
    return [
        Probe(f"behind-{count}-{index}", tuple(ids), chosen, seed=2000 + index)
        for index, (ids, chosen) in enumerate(zip(prompts, params))
    ]


def history_probes(tokenizer: Tokenizer, vocab_size: int, *, quick: bool) -> list[Probe]:
    """Requests whose every token depends on which tokens came before, not only on the model: few tokens are likely,
    and each is less so once it was drawn.
    """
    text = _token_ids(tokenizer, LONGEST_BLOCK)
    max_tokens = 12 if quick else 24
    likely = {token % vocab_size: 20.0 + index / 4 for index, token in enumerate(text[:9])}
    common = {"max_tokens": max_tokens, "logprobs": 2, "ignore_eos": True, "logit_bias": likely}
    asked: tuple[dict[str, object], ...] = (
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"temperature": 0.7, "presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 6, "stop_token_ids": text[:3]},
    )
    return [
        Probe(
            f"history-{index}",
            tuple(text[index : 3 * index + 7]),
            SamplingParams(**{**common, **params}),  # type: ignore[arg-type]
            seed=3000 + index,
        )
        for index, params in enumerate(asked)
    ]


def short_probes(probes: list[Probe], longest: int = SHORT) -> list[Probe]:
    return [probe for probe in probes if len(probe.token_ids) <= longest]


def spread(probes: list[Probe], count: int) -> list[Probe]:
    """At most so many of them, of all lengths, the longest among them."""
    longest_first = sorted(probes, key=lambda probe: -len(probe.token_ids))
    return longest_first[:: -(-len(longest_first) // count)]


def growing_first(probes: list[Probe], block_size: int) -> list[Probe]:
    """The probes, those in front whose answers need more blocks than their prompts."""

    def grows(probe: Probe) -> bool:
        num_prompt, num_output = len(probe.token_ids), probe.params.max_tokens or 0
        return -(-num_prompt // block_size) < -(-(num_prompt + num_output - 1) // block_size)

    return sorted(probes, key=grows, reverse=True)


def _token_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    body = tokenizer.encode(TEXT, add_special_tokens=False)
    while len(ids) < count:
        ids += body
    return ids[:count]


def _parameters(max_tokens: int, text: list[int], vocab_size: int) -> list[SamplingParams]:
    """What a request may ask of the sampler, one of each kind."""

    def params(**asked: object) -> SamplingParams:
        common = {"max_tokens": max_tokens, "logprobs": 2, "ignore_eos": True}
        return SamplingParams(**{**common, **asked})  # type: ignore[arg-type]

    bias = {text[index] % vocab_size: 2.5 - index for index in range(4)}
    return [
        params(temperature=0.0),
        params(temperature=0.8, top_p=0.9),
        params(temperature=1.0, top_k=20, min_p=0.02),
        params(temperature=0.0, logprobs=5, frequency_penalty=0.7, logit_bias=bias),
        params(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5),
        params(temperature=1.2, n=2, max_tokens=max_tokens - 2),
        params(temperature=0.0, prompt_logprobs=1),
        params(temperature=1.0, ignore_eos=False, min_tokens=2, stop_token_ids=[text[3]]),
        params(temperature=1.5, logprobs=None),
    ]
