from __future__ import annotations

from engine_harness import TypingDrafter, TypingExecutor, make_engine, request, run
from prometheus_client.parser import text_string_to_metric_families

from poise.core.clock import ManualClock
from poise.core.output import SchedulerOutput
from poise.engine.llm_engine import LLMEngine
from poise.engine.metrics import Histogram, one_two_five_buckets
from poise.engine.scheduling_metrics import SchedulingMetrics

LABELS = {"model_name": "bytes", "engine": "0"}


def scrape(engine: LLMEngine) -> dict[str, float]:
    """Every sample by name; labels beyond model_name and engine are appended."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(engine.metrics.render().decode()):
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            others = {k: v for k, v in sample.labels.items() if k not in LABELS}
            name = sample.name + "".join(f" {k}={v}" for k, v in sorted(others.items()))
            assert name not in samples
            samples[name] = sample.value
    return samples


def test_one_two_five_buckets() -> None:
    assert one_two_five_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five_buckets(499) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_a_bucket_holds_its_upper_bound() -> None:
    histogram = Histogram("name", "", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 7.5
    [sample] = [s for s in histogram.family({}).samples if s.labels == {"le": "2.0"}]
    assert sample.value == 4


def test_a_known_schedule() -> None:
    """Two requests, one second per step, one running at a time: every figure follows."""
    clock = ManualClock()
    executor = TypingExecutor(lambda prompt: b"abcdef")
    engine = make_engine(executor, clock=clock, max_num_seqs=1, max_num_batched_tokens=8)

    def tick(output: SchedulerOutput) -> None:
        clock.advance(1.0)

    executor.fail = tick
    engine.add_request(
        0, request("twelve bytes", max_tokens=3)
    )  # steps 1-2 prompt, tokens at 2 3 4
    engine.add_request(
        1, request("four", max_tokens=50)
    )  # step 5 prompt; tokens at 5 … 11, then EOS
    before = scrape(engine)
    assert before["vllm:num_requests_waiting"] == 2
    engine.step()
    assert scrape(engine)["vllm:num_requests_running"] == 1
    assert scrape(engine)["vllm:num_requests_waiting"] == 1
    assert scrape(engine)["poise_kv_blocks_free"] == 62
    assert scrape(engine)["vllm:kv_cache_usage_perc"] == 2 / 64
    while engine.has_unfinished_requests():
        engine.step()
    samples = scrape(engine)
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "poise_kv_blocks_total": 64,
        "poise_kv_blocks_free": 64,
        "poise_engine_steps_total": 11,
        "vllm:prompt_tokens_total": 16,
        "vllm:prompt_tokens_cached_total": 0,
        "vllm:generation_tokens_total": 10,
        "vllm:num_preemptions_total": 0,
        "vllm:corrupted_requests_total": 0,
        "vllm:request_success_total finished_reason=length": 1,
        "vllm:request_success_total finished_reason=stop": 1,
        "vllm:request_success_total finished_reason=abort": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:time_to_first_token_seconds_sum": 2 + 5,
        "vllm:time_to_first_token_seconds_bucket le=2.5": 1,
        "vllm:inter_token_latency_seconds_count": 2 + 6,
        "vllm:inter_token_latency_seconds_sum": 8,
        "vllm:e2e_request_latency_seconds_sum": 4 + 11,
        "vllm:request_queue_time_seconds_sum": 0 + 4,
        "vllm:request_prefill_time_seconds_sum": 2 + 1,
        "vllm:request_decode_time_seconds_sum": 2 + 6,
        "vllm:request_inference_time_seconds_sum": 4 + 7,
        "vllm:request_time_per_output_token_seconds_sum": 1 + 1,
        "vllm:request_prompt_tokens_sum": 16,
        "vllm:request_generation_tokens_sum": 10,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_max_tokens_sum": 53,
        "vllm:iteration_tokens_total_count": 11,
        "vllm:iteration_tokens_total_sum": 12 + 2 + 4 + 6,
        "vllm:cache_config_info": 1,
    }
    assert {name: samples[name] for name in expected} == expected


def test_prefix_cache_counters() -> None:
    engine = make_engine()
    prompt = "a prompt of 24 bytes ..."
    for _ in range(2):
        run(engine, request(prompt, max_tokens=1))
    samples = scrape(engine)
    assert samples["vllm:prefix_cache_queries_total"] == 48
    assert samples["vllm:prefix_cache_hits_total"] == 20
    assert samples["vllm:prompt_tokens_cached_total"] == 20


def test_an_abort_is_counted_but_not_timed() -> None:
    engine = make_engine()
    engine.add_request(0, request(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort(0)
    engine.take_outputs()
    samples = scrape(engine)
    assert samples["vllm:request_success_total finished_reason=abort"] == 1
    assert samples["vllm:e2e_request_latency_seconds_count"] == 0


def test_tokens_cut_by_a_stop_string_count_as_usage_does() -> None:
    engine = make_engine(TypingExecutor(lambda prompt: b"abSTOPcd"))
    [answers] = run(engine, request(max_tokens=50, stop=["STOP"]))
    assert engine.metrics.generation_tokens == len(answers[0].token_ids) == 6


def test_drafts_are_counted_under_vllms_names() -> None:
    """Typed is "twel?", drafted "twelve": four of six are accepted, then none of two, then the end."""
    executor = TypingExecutor(lambda prompt: b"twel?s")
    engine = make_engine(executor, drafter=TypingDrafter(b"twelve"))
    speculative = {"method": "ngram", "num_speculative_tokens": 6}
    engine.add_request(0, request("hello", max_tokens=50, speculative=speculative))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    samples = {
        (sample.name.removeprefix("vllm:spec_decode_num_"), sample.labels.get("position")): sample
        for family in SchedulingMetrics(engine._scheduler).families({})
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode_")
    }
    values = {name: sample.value for name, sample in samples.items()}
    assert values["drafts_total", None] == 3
    assert values["draft_tokens_total", None] == 6 + 2 + 1  # behind "twel?": "e", the end; the end
    assert values["accepted_tokens_total", None] == 5
    positions = [values["accepted_tokens_per_pos_total", str(place)] for place in range(6)]
    assert positions == [2, 1, 1, 1, 0, 0]
    stats = outputs[-1][1].stats
    assert stats is not None
    assert (stats.num_accepted_tokens, stats.num_drafted_tokens) == (5, 9)
    finished = engine.timeline("r")[-1]
    assert (finished["accepted_tokens"], finished["drafted_tokens"]) == (5, 9)
