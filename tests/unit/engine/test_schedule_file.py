"""A recording on disk, from an engine that was built to the verb that replays it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_harness import GROUPS, TypingExecutor, make_engine, request, run

from poise.cli.main import run as poise
from poise.core.clock import MonotonicClock
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.recording import RecordingScheduler, SchedulerSetup
from poise.core.step_time import GUESSED_COST
from poise.core.tenant import NO_TENANTS
from poise.engine.schedule_file import ScheduleFile, read_schedule
from poise.errors import ConfigError


def recorded(path: Path) -> int:
    """Records a few requests; returns the number of steps."""
    setup = SchedulerSetup(
        Limits(8, 32, 200), "fcfs", NO_TENANTS, GROUPS, 12, 4, False, GUESSED_COST, {}
    )
    file = ScheduleFile(str(path))
    engine = make_engine(TypingExecutor(lambda prompt: prompt * 5))
    engine._scheduler = RecordingScheduler(
        setup, KVCacheManager(GROUPS, 12, 4, None), MonotonicClock(), file.write
    )
    requests = [request("abcdef", max_tokens=20, seed=i, stop_token_ids=[100]) for i in range(4)]
    run(engine, *requests)
    file.close()
    return engine.metrics.num_steps


def test_what_was_recorded_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.jsonl"
    num_steps = recorded(path)
    assert poise(["replay", str(path)]) == 0
    assert capsys.readouterr().out == f"{num_steps} steps, every one as recorded\n"


def test_a_recording_that_was_cut_off_replays_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.jsonl"
    recorded(path)
    path.write_bytes(path.read_bytes()[:-300])
    assert poise(["replay", str(path)]) == 0


def test_what_is_no_recording_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}\n')
    assert poise(["replay", str(path)]) != 0
    assert "no recording" in capsys.readouterr().err
    path.write_text("not json\n")
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        list(read_schedule(path))
    with pytest.raises(ConfigError):
        list(read_schedule(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="--record-schedule"):
        ScheduleFile(str(tmp_path / "no" / "folder"))
