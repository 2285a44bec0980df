"""What a profile says of steps whose sizes are known, and that it changes no byte."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from native_models import load, tiny_gguf
from scheduler_outputs import new, output, rows

from poise.engine.metrics import EngineMetrics
from poise.engine.profile import EngineProfile, StepTimes, profile_report, trace_events
from poise.engine.utilisation import Utilisation
from poise.executor.profile import TRACED_STEPS, ExecutorProfile
from poise.executor.stored_rates import StoredRates, store_rates, stored_rates
from poise.kernels.cpu.rates import MachineRates, ReadRate, measure_rates
from poise.kernels.cpu.recorded import COUNTED_TOGETHER, RecordedOperation, Rows, WorkCounter
from poise.kernels.ops import Step


def rows_of(*sequences: tuple[int, int], logit_rows: int = 1) -> Rows:
    """Of a step's arrays; sequences given as (first position, rows)."""
    counts = [count for _, count in sequences]
    positions = np.concatenate([np.arange(first, first + n) for first, n in sequences])
    step = Step(
        token_ids=np.zeros(sum(counts), np.int32),
        positions=positions.astype(np.int32),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        block_tables=np.zeros((len(counts), 1), np.int32),
        logit_rows=np.arange(logit_rows, dtype=np.int32),
    )
    rows = Rows.of(step)
    assert rows.spans == list(sequences)
    assert rows.num_rows == sum(counts)
    return rows


def test_keys_are_counted_by_sequence_and_by_row() -> None:
    assert rows_of((10, 1), (0, 3)).keys(None) == (11 + 3, 11 + (1 + 2 + 3))


def test_a_window_bounds_the_keys() -> None:
    assert rows_of((10, 1), (0, 3)).keys(4) == (4 + 3, 4 + (1 + 2 + 3))
    assert rows_of((10, 3)).keys(4) == (6, 12)  # positions 7 … 12


def test_keys_that_another_pass_served_are_not_read() -> None:
    counter = WorkCounter(
        [
            RecordedOperation("attention", bytes_per_key=7, flops_per_key=5),
            RecordedOperation("attention", bytes_per_key=7, flops_per_key=5, window=64, kv_group=1),
        ]
    )
    counter.add(rows_of((300, 1), (280, 1)), [256, 0])
    counter.add(rows_of((300, 1)))
    full, local = counter.by_operation()
    assert full.read_bytes == 7 * (301 + 281 - 256 + 301)
    assert full.flops == 5 * (301 + 281 + 301)
    assert local.read_bytes == 7 * 3 * 64
    assert counter.spared_keys == 256


def test_weights_are_read_once_a_step_and_output_rows_by_tiles() -> None:
    counter = WorkCounter(
        [
            RecordedOperation("embed", weight_bytes=10),
            RecordedOperation("norm_linear", weight_bytes=1000, flops_per_row=2000),
            RecordedOperation("attention", bytes_per_key=7, flops_per_key=5),
            RecordedOperation("logits", weight_bytes=100, flops_per_row=200),
        ]
    )
    counter.add(rows_of((0, 40), logit_rows=33))
    counter.add(rows_of((40, 1)))
    work = counter.by_operation()
    assert [w.read_bytes for w in work] == [41 * 10, 2 * 1000, 7 * (40 + 41), 3 * 100]
    assert [w.flops for w in work] == [0, 41 * 2000, 5 * (820 + 41), 34 * 200]
    assert counter.total().read_bytes == sum(w.read_bytes for w in work)


def test_rows_that_nobody_asks_for_are_no_work_behind_the_last_kv_write() -> None:
    counter = WorkCounter(
        [
            RecordedOperation("attention", bytes_per_key=7, flops_per_key=5, wanted_only=True),
            RecordedOperation(
                "attention", bytes_per_key=7, flops_per_key=5, window=4, wanted_only=True
            ),
            RecordedOperation("gated_mlp", weight_bytes=1000, flops_per_row=2000, wanted_only=True),
        ]
    )
    counter.add(rows_of((10, 3), (20, 2), logit_rows=0))
    counter.add(rows_of((10, 3), (20, 2), logit_rows=2))  # positions 10 and 11
    work = counter.by_operation()
    assert [w.read_bytes for w in work] == [7 * 12, 7 * 5, 1000]  # positions 0 … 11, and 7 … 11
    assert [w.flops for w in work] == [5 * (11 + 12), 5 * 8, 2 * 2000]
    counter.add(rows_of((10, 3), logit_rows=3))
    assert [w.flops for w in counter.by_operation()] == [5 * (23 + 36), 5 * 20, 5 * 2000]


def test_steps_counted_together_are_those_counted_one_by_one() -> None:
    operations = [RecordedOperation("attention", bytes_per_key=7, flops_per_key=5)]
    together, alone = WorkCounter(operations), WorkCounter(operations)
    for position in range(2 * COUNTED_TOGETHER + 5):
        together.add(rows_of((position, 1)), [position % 2])
        alone.add(rows_of((position, 1)), [position % 2])
        alone.total()
    assert together.total() == alone.total()
    assert together.spared_keys == alone.spared_keys == COUNTED_TOGETHER + 2


def test_no_step_is_lost_to_a_reader_in_another_thread() -> None:
    counter, num_steps = WorkCounter([RecordedOperation("embed", weight_bytes=10)]), 20_000
    row, seen, done = rows_of((0, 1)), [0], threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(counter.total().read_bytes)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(num_steps):
        counter.add(row)
    done.set()
    reader.join()
    assert seen == sorted(seen)
    assert counter.total().read_bytes == num_steps * 10


def test_a_profile_sums_all_steps_and_keeps_the_last() -> None:
    profile = ExecutorProfile([RecordedOperation("embed"), RecordedOperation("logits")], threads=2)
    num_steps = TRACED_STEPS + 7
    for step in range(num_steps):
        begin = step * 100
        profile.add(rows_of((step, 1)), begin, begin + 60, [begin, begin + 10, begin + 50], [3, 4])
    assert [operation.nanoseconds for operation in profile.operations()] == [
        10 * num_steps, 40 * num_steps
    ]  # fmt: skip
    assert profile.waited_nanoseconds == [3 * num_steps, 4 * num_steps]
    assert profile.native_nanoseconds == 60 * num_steps
    assert [traced.begin for traced in profile.traced] == [
        step * 100 for step in range(7, num_steps)
    ]


@pytest.fixture
def executor(tmp_path, monkeypatch):
    return load(tiny_gguf(tmp_path, "llama"), monkeypatch, "baseline", threads=2).executor


def two_steps(executor):
    ids = [5, 6, 7, 8]
    first = executor.execute(
        output([rows(1, 0, 4, samples=True)], [new(1, ids, [1], temperature=0)])
    )
    second = executor.execute(output([rows(1, 4, 1, samples=True)]))
    return first.token_ids[1] + second.token_ids[1]


def test_a_profile_times_every_operation_and_changes_nothing(executor) -> None:
    plain = two_steps(executor)
    executor.start_profile()
    assert two_steps(executor) == plain
    profile = executor.stop_profile()
    assert executor.stop_profile() is None
    assert (profile.num_steps, profile.num_rows, profile.num_logit_rows) == (2, 5, 2)
    names = [operation.name for operation in profile.operations()]
    layers = names.count("attention")
    assert names == [
        "embed",
        *["norm_linear", "rope_kv_write", "attention", "linear_residual", "gated_mlp"] * layers,
        "logits",
    ]
    assert all(operation.nanoseconds > 0 for operation in profile.operations())
    inside = sum(operation.nanoseconds for operation in profile.operations())
    assert inside <= profile.native_nanoseconds
    assert len(profile.waited_nanoseconds) == 2
    assert two_steps(executor) == plain  # and off again
    done = executor.work_done()
    assert done.read_bytes > 0
    assert done.flops > 0
    assert done.seconds > 0


def test_a_shared_prefix_is_read_once(executor) -> None:
    """Two requests on the same 16 blocks, each with a token of its own behind them."""
    ids, blocks = list(range(3, 259)), list(range(1, 17))
    executor.execute(output([rows(1, 0, 256)], [new(1, ids, blocks)]))
    before = executor.work_done()
    crowd = [
        new(2, [*ids, 5], [*blocks, 20], temperature=0),
        new(3, [*ids, 6], [*blocks, 21], temperature=0),
    ]
    executor.start_profile()
    executor.execute(output([rows(2, 256, 1, samples=True), rows(3, 256, 1, samples=True)], crowd))
    done, profile = executor.work_done(), executor.stop_profile()
    assert done.spared_keys - before.spared_keys == profile.spared_keys == 256
    attention = [o.read_bytes for o in profile.operations() if o.name == "attention"]
    token_bytes = 4 * 2 * 16  # K and V in bf16, KV heads, head_dim
    assert attention == [(257 + 1) * token_bytes] * len(attention)


def test_the_report_adds_up_and_the_trace_is_json(executor) -> None:
    executor.start_profile()
    two_steps(executor)
    profile = executor.stop_profile()
    assert profile.own_nanoseconds > 0
    engine = EngineProfile(begin=0)
    executed = 1_000 + profile.native_nanoseconds + profile.own_nanoseconds + 3_000
    done = executed + 2_000
    engine.add(StepTimes(0, 1_000, executed, done))
    engine.interrupt()  # nothing is left to do for a while; 700 ns between the other two steps
    engine.add(StepTimes(*[done + 10**6] * 4))
    engine.add(StepTimes(*[done + 10**6 + 700] * 4))
    figures = profile_report(engine, profile, end=2 * 10**9, http_nanoseconds=500)
    kinds = figures["operations"]
    assert kinds["attention"]["operations"] == kinds["gated_mlp"]["operations"]
    together = sum(kind["seconds"] for kind in kinds.values()) + figures["other_native_seconds"]
    assert together == pytest.approx(figures["native_seconds"])
    assert figures["python_seconds"]["schedule"] == 1e-6
    assert figures["python_seconds"]["batch and results"] == pytest.approx(3e-6)
    assert figures["python_seconds"]["update"] == 2e-6
    assert figures["python_seconds"]["between steps"] == 7e-7
    assert figures["python_seconds"]["http"] == 5e-7
    assert figures["profiling_seconds"] == profile.own_nanoseconds / 1e9
    assert json.loads(json.dumps(figures)) == figures
    events = json.loads(json.dumps(trace_events(engine, profile)))["traceEvents"]
    assert sum(event["name"] == "step" for event in events) == 2
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_probes_give_positive_rates() -> None:
    rates = measure_rates(1 << 20, 2)
    assert rates.read.bytes_per_second > 0
    assert set(rates.products) == {"int8", "bf16", "f32"}
    assert {(rate.threads, rate.huge_pages) for rate in rates.reads} == {
        (1, False), (1, True), (2, False), (2, True)
    }  # fmt: skip


def test_rates_are_kept_for_the_same_machine_only(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "home"))
    assert stored_rates("avx2", 2) is None
    reads = [ReadRate(2e10, 2, True, 0), ReadRate(1e10, 1, True, 0)]
    store_rates(MachineRates(1 << 20, reads, {"int8": 4e11}, "avx2", 2))
    kept = stored_rates("avx2", 2)
    assert kept is not None
    assert (kept.read_bytes, kept.int8_operations) == (2e10, 4e11)
    store_rates(MachineRates(1 << 20, reads[1:], {"int8": 5e11}, "avx2", 2))
    kept = stored_rates("avx2", 2)
    assert kept is not None
    assert (kept.read_bytes, kept.int8_operations) == (2e10, 5e11)
    assert stored_rates("avx2", 1) is None
    assert stored_rates("baseline", 2) is None
    file = tmp_path / "home" / "machine-rates.json"
    of_an_older_probe = json.loads(file.read_bytes())
    del of_an_older_probe["probe"]
    file.write_text(json.dumps(of_an_older_probe))
    assert stored_rates("avx2", 2) is None
    file.write_text("{")
    assert stored_rates("avx2", 2) is None


def test_metrics_hold_work_and_shares_of_measured_rates(executor) -> None:
    def samples(rates: StoredRates | None) -> dict[str, float]:
        metrics = EngineMetrics(
            "tiny",
            max_model_len=64,
            num_blocks=4,
            cache_config={},
            work=Utilisation(executor.work_done, rates),
        )
        lines = metrics.render().decode().splitlines()
        return {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("poise_")
        }

    two_steps(executor)
    done = executor.work_done()
    without = samples(None)
    assert without["poise_modelled_read_bytes_total"] == done.read_bytes
    assert without["poise_modelled_flops_total"] == done.flops
    assert without["poise_spared_keys_total"] == done.spared_keys == 0
    assert "poise_mbu" not in without
    rates = StoredRates("cpu", "baseline", 2, read_bytes=1e10, int8_operations=1e11)
    shares = samples(rates)
    assert shares["poise_mbu"] == pytest.approx(done.read_bytes / done.seconds / 1e10)
    assert shares["poise_mfu"] == pytest.approx(done.flops / done.seconds / 1e11)
