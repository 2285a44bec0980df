"""Schedules: one seed, one hash; files that replay; laws of lengths and arrivals; the six reference workloads."""

from __future__ import annotations

import json
import math
import random
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.bench.arrivals import ClosedLoop, OpenArrivals
from poise.bench.lengths import Constant, LogNormal, Uniform, parse_lengths, ranged
from poise.bench.prompt_file import read_prompts
from poise.bench.record import RecordError
from poise.bench.schedule import PlannedRequest, Schedule, read_schedule, shareable_tokens
from poise.bench.workloads import (
    PRESET_NAMES,
    PRESETS,
    PrefixTree,
    RandomTokens,
    draw_schedule,
    parse_prefix_tree,
    preset_schedule,
    word,
)
from poise.errors import ConfigError

RANDOM = RandomTokens(Uniform(4, 30), LogNormal(2, 20), prefix_tokens=5)


def load_py_closed(seed: int, name: str) -> tuple[list[list[int]], list[int]]:
    """Prompts and warm-up as the reference script draws them."""
    requests, _, length, shared, _ = {
        "W1": (3, 1, 128, 0, 128),
        "W4": (32, 16, 1088, 1024, 64),
    }[name]
    source = random.Random(f"{seed}/{name}")

    def draw(count: int) -> list[int]:
        return [source.randrange(1000, 40000) for _ in range(count)]

    prefix = draw(shared)
    return [prefix + draw(length - shared) for _ in range(requests)], draw(64)


@pytest.mark.parametrize("name", ["W1", "W4"])
def test_closed_presets_are_the_reference_workloads(name: str) -> None:
    prompts, warmup = load_py_closed(7, name)
    schedule = preset_schedule(name, 7)
    assert [request.prompt for request in schedule.requests] == prompts
    assert schedule.warmups[0].prompt == warmup
    assert schedule.concurrency == PRESETS[name].concurrency
    assert {request.max_tokens for request in schedule.requests} == {PRESETS[name].output_tokens}


def test_the_open_preset_is_the_reference_workload() -> None:
    source = random.Random("3/W6")

    def length(low: int, high: int) -> int:
        value = source.lognormvariate(math.log((low * high) ** 0.5), 0.7)
        return int(min(high, max(low, value)))

    jobs, now = [], 0.0
    while now < 5.0:
        now += source.expovariate(2.0)
        prompt = [source.randrange(1000, 40000) for _ in range(length(32, 2048))]
        jobs.append((now, prompt, length(16, 256)))
    schedule = preset_schedule("W6", 3, rate=2.0, seconds=5.0)
    assert [(item.at, item.prompt, item.max_tokens) for item in schedule.requests] == jobs
    assert not schedule.is_closed
    assert schedule.concurrency is None


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_have_one_hash_for_a_seed(name: str) -> None:
    assert preset_schedule(name, 1).sha256 == preset_schedule(name, 1).sha256
    assert preset_schedule(name, 1).sha256 != preset_schedule(name, 2).sha256
    chat = preset_schedule(name, 1, "chat").requests[0]
    assert chat.input_length is None
    assert chat.prompt[0]["role"] == "user"  # type: ignore[index]


def test_the_hash_is_the_same_on_every_machine() -> None:
    assert preset_schedule("W5", 1).sha256.startswith(GOLDEN_W5)


GOLDEN_W5 = "eac106fedb50f186"


arrivals = st.one_of(
    st.integers(1, 9).map(ClosedLoop),
    st.builds(
        OpenArrivals,
        st.floats(0.1, 100.0),
        st.one_of(st.just(1.0), st.just(math.inf), st.floats(0.2, 5.0)),
        st.one_of(st.none(), st.integers(1, 4)),
    ),
)


@settings(deadline=None)
@given(
    st.integers(0, 2**32), arrivals, st.integers(1, 12), st.sampled_from(["completions", "chat"])
)
def test_a_written_schedule_replays(
    tmp_path_factory: pytest.TempPathFactory, seed: int, arrival: ClosedLoop, n: int, kind: str
) -> None:
    path = tmp_path_factory.mktemp("schedules") / "schedule.json"
    schedule = draw_schedule(RANDOM, arrival, seed, kind, num_requests=n)  # type: ignore[arg-type]
    schedule.write(path)
    again = read_schedule(path)
    assert again.canonical == schedule.canonical
    assert list(again.requests) == list(schedule.requests)
    assert again.sha256 == schedule.sha256
    assert again.concurrency == schedule.concurrency


def test_one_seed_gives_the_same_prompts_under_every_arrival_process() -> None:
    closed = draw_schedule(RANDOM, ClosedLoop(2), 5, num_requests=6)
    opened = draw_schedule(RANDOM, OpenArrivals(3.0), 5, num_requests=6)
    assert [r.prompt for r in closed.requests] == [r.prompt for r in opened.requests]


def test_warmups_share_nothing_with_the_measured_prompts() -> None:
    schedule = draw_schedule(RANDOM, ClosedLoop(1), 5, num_requests=20, num_warmups=3)
    starts = {request.prompt[0] for request in schedule.requests}
    assert len(schedule.warmups) == 3
    assert not starts & {warm.prompt[0] for warm in schedule.warmups}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: {**file, "sha256": "0" * 64}, "claims"),
        (lambda file: {**file, "schema": "x/1"}, "schema"),
        (lambda file: {"schema": file["schema"]}, "not a schedule file"),
        (lambda file: [], "not a schedule file"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change, complaint: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "schedule.json"
    draw_schedule(RANDOM, ClosedLoop(1), 5, num_requests=2).write(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(RecordError, match=complaint):
        read_schedule(path)


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([], "without requests"),
        ([PlannedRequest([1], 1)], "planned instants"),
        ([PlannedRequest([1], 1, 2.0), PlannedRequest([1], 1, 1.0)], "planned instants"),
        ([PlannedRequest([], 1, 1.0)], "proper prompt"),
        ([PlannedRequest([1], 0, 1.0)], "proper prompt"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(
    tmp_path: Path, requests: list[PlannedRequest], complaint: str
) -> None:
    path = tmp_path / "schedule.json"
    Schedule("completions", 1, {}, {"process": "poisson", "rate": 1.0}, requests).write(path)
    with pytest.raises(RecordError, match=complaint):
        read_schedule(path)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.5, 50.0), st.sampled_from([0.5, 1.0, 3.0, math.inf]))
def test_open_gaps_follow_their_law(rate: float, burstiness: float) -> None:
    process = OpenArrivals(rate, burstiness)
    instants = list(islice(process.instants(random.Random(1)), 4000))
    assert instants == sorted(instants)
    gaps = [b - a for a, b in pairwise(instants)]
    mean = math.fsum(gaps) / len(gaps)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean * rate == pytest.approx(1.0, abs=0.12)
    expected = 0.0 if math.isinf(burstiness) else burstiness**-0.5
    assert deviation * rate == pytest.approx(expected, rel=0.15, abs=1e-9)


def test_a_duration_ends_the_schedule() -> None:
    schedule = draw_schedule(RANDOM, OpenArrivals(10.0), 1, seconds=3.0)
    assert all(request.at is not None and request.at < 3.0 for request in schedule.requests)
    assert len(schedule.requests) > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClosedLoop(0),
        lambda: OpenArrivals(0.0),
        lambda: OpenArrivals(math.inf),
        lambda: OpenArrivals(math.nan),
        lambda: OpenArrivals(1.0, 0.0),
        lambda: OpenArrivals(1.0, 1.0, 0),
        lambda: ranged(10, 1.0),
        lambda: ranged(0, 0.0),
        lambda: preset_schedule("W7", 1),
        lambda: preset_schedule("W6", 1, seconds=0.0),
        lambda: draw_schedule(RANDOM, ClosedLoop(1), 1),
        lambda: draw_schedule(RANDOM, OpenArrivals(1.0), 1),
        lambda: draw_schedule(RANDOM, OpenArrivals(0.001), 1, seconds=0.001),
    ],
)
def test_wrong_values_are_named(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        make()


def test_lengths_by_name(tmp_path: Path) -> None:
    assert parse_lengths("256", "input_length") == Constant(256)
    assert parse_lengths("uniform:3:9", "input_length") == Uniform(3, 9)
    assert parse_lengths("lognormal:32:2048", "input_length") == LogNormal(32, 2048)
    assert parse_lengths("lognormal:32:2048:1.5", "input_length") == LogNormal(32, 2048, 1.5)
    (tmp_path / "lengths.jsonl").write_text('3\n{"input_length": 5}\n')
    law = parse_lengths(f"file:{tmp_path / 'lengths.jsonl'}", "input_length")
    assert {law.draw(random.Random(seed)) for seed in range(20)} == {3, 5}
    assert ranged(100, 0.5) == Uniform(50, 150)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "uniform:9:3", "uniform:1", "normal:1:2", "lognormal:1:2:x", "1.5"]
)
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        parse_lengths(text, "input_length")


@pytest.mark.parametrize("text", ["0x1", "5", "5x", "axb", "5x2:0.5", "5x2:1,-1", "5x2:0,0", ""])
def test_wrong_trees_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="prefix tree level"):
        parse_prefix_tree(text)


def test_a_prefix_tree_shares_what_it_says() -> None:
    tree = PrefixTree(parse_prefix_tree("100x1/20x2:0.9,0.1"), Constant(10), Constant(4))
    prompts = [r.prompt for r in islice(tree.requests(random.Random(1), "completions"), 200)]
    assert {len(prompt) for prompt in prompts} == {130}
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    children = [tuple(prompt[100:120]) for prompt in prompts]
    assert len(set(children)) == 2
    assert max(children.count(child) for child in set(children)) > 150
    assert len({tuple(prompt[120:]) for prompt in prompts}) == 200


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_shareable_tokens_are_all_tokens_less_the_trie(prompts: list[list[int]]) -> None:
    edges = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    requests = [PlannedRequest(prompt, 1) for prompt in prompts]
    assert shareable_tokens(requests) == sum(map(len, prompts)) - len(edges)


def test_text_has_no_known_tokens() -> None:
    assert shareable_tokens([PlannedRequest("hello", 1)]) is None
    assert shareable_tokens([PlannedRequest([{"role": "user", "content": "x"}], 1)]) is None


def test_numbers_have_different_words() -> None:
    assert len({word(number) for number in range(40000)}) == 40000


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one"\n\n{"prompt": "two", "output_tokens": 7}\n{"prompt_token_ids": [1, 2]}\n'
    )
    source = read_prompts(path, Constant(3)).requests(random.Random(1), "completions")
    found = list(islice(source, 4))
    assert [request.prompt for request in found] == ["one", "two", [1, 2], "one"]
    assert [request.max_tokens for request in found] == [3, 7, 3, 3]
    assert [request.input_length for request in found] == [None, None, 2, None]
    assert not found[0].ignore_eos


def test_chat_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n"text"\n')
    prompts = read_prompts(path, Constant(3))
    found = list(islice(prompts.requests(random.Random(1), "chat"), 2))
    assert found[1].prompt == [{"role": "user", "content": "text"}]
    with pytest.raises(RecordError, match="for the chat endpoint"):
        next(prompts.requests(random.Random(1), "completions"))


@pytest.mark.parametrize(
    "line",
    [
        *("{", "3", "{}", '""', '{"prompt": ""}', '{"prompt": [true]}', '{"prompt": [1, "a"]}'),
        *('{"messages": [{}]}', '{"prompt": "a", "text": "b"}', '{"prompt": "a", "max_tokens": 0}'),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(RecordError, match=r"prompts\.jsonl:2: "):
        read_prompts(path, Constant(3))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl", Constant(3))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RecordError, match="no prompts"):
        read_prompts(tmp_path / "empty.jsonl", Constant(3))
