"""`poise bench serve`: offers a load to a running server and reports what it did, under vLLM's flag names where they exist.

Turns flags into a schedule and settings; the measuring is `poise.bench`. Invariant: exit status 0 only for a run in which every
gate held; what was measured is printed and kept in every case.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from poise.bench.arrivals import Arrivals, ClosedLoop, OpenArrivals
from poise.bench.client import Target, clean_base_url
from poise.bench.gates import GateLimits
from poise.bench.lengths import Constant, Lengths, parse_lengths, ranged
from poise.bench.measure import METRIC_NAMES, parse_slos
from poise.bench.prompt_file import read_prompts
from poise.bench.record import ClientOptions, RequestRow, RunRecord, write_run
from poise.bench.report import DEFAULT_METRICS, LiveSummary, table, verdict, write_csv
from poise.bench.runner import INTERRUPTED, RunSettings, reach, run_schedule
from poise.bench.schedule import Schedule, read_schedule
from poise.bench.statistics import HYNDMAN_FAN_TYPES, PercentileChoice
from poise.bench.workloads import (
    OPEN_PRESET,
    OPEN_PRESET_RATE,
    OPEN_PRESET_SECONDS,
    OPEN_PRESET_SLOS,
    PRESET_NAMES,
    TOKEN_RANGE,
    Kind,
    PrefixTree,
    RandomTokens,
    TreeLevel,
    Workload,
    draw_schedule,
    parse_prefix_tree,
    preset_schedule,
)
from poise.errors import ConfigError

KEY_VARIABLES = ("POISE_BENCH_API_KEY", "OPENAI_API_KEY")
ENDPOINTS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DEFAULT_REQUESTS = 1000


@click.command("serve")
@click.argument("more_slos", nargs=-1, metavar="")
@click.option("--base-url", "--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--backend", type=click.Choice(["openai", "vllm", "openai-chat"]), default="openai")
@click.option("--endpoint", metavar="PATH", help="Default: /v1/completions, or chat's.")
@click.option("--model", metavar="NAME", help="Default: the first that /v1/models names.")
@click.option("--name", default="", help="What to call the server in the record.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice([*PRESET_NAMES, "all"]),
    help="A reference workload; may be given several times.",
)
@click.option("--schedule", "schedule_file", type=Path, help="Replay this schedule file.")
@click.option("--save-schedule", type=Path, help="Write the schedule to a file.")
@click.option(
    "--dataset-name",
    type=click.Choice(["random", "prefix_repetition", "prefix_tree", "custom"]),
    default="random",
    show_default=True,
)
@click.option("--dataset-path", type=Path, help="JSONL of prompts, for custom.")
@click.option("--custom-output-len", type=int, default=256, show_default=True)
@click.option("--shuffle/--no-shuffle", default=False, help="Shuffle custom prompts by the seed.")
@click.option("--random-input-len", type=int, default=1024, show_default=True)
@click.option("--random-output-len", type=int, default=128, show_default=True)
@click.option("--random-range-ratio", type=float, default=0.0, show_default=True)
@click.option("--random-prefix-len", type=int, default=0, show_default=True)
@click.option("--input-lengths", metavar="LAW", help="uniform:32:512, lognormal:32:2048, file:F.")
@click.option("--output-lengths", metavar="LAW", help="As --input-lengths.")
@click.option("--prefix-repetition-prefix-len", type=int, default=256, show_default=True)
@click.option("--prefix-repetition-suffix-len", type=int, default=256, show_default=True)
@click.option("--prefix-repetition-num-prefixes", type=int, default=10, show_default=True)
@click.option("--prefix-repetition-output-len", type=int, default=128, show_default=True)
@click.option("--prefix-tree", metavar="LEVELS", help="512x1/256x4:0.7,0.1,0.1,0.1 from the root.")
@click.option("--token-range", metavar="LOW:HIGH", help="Random ids [default: 1000:40000].")
@click.option("--num-prompts", type=click.IntRange(1), help=f"Default: {DEFAULT_REQUESTS}.")
@click.option("--duration", type=float, metavar="SECONDS", help="Arrivals before this instant.")
@click.option("--request-rate", type=float, metavar="RATE", help="Per second [default: inf].")
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="Shape of gamma gaps: 1 is Poisson, inf a constant rate.",
)
@click.option("--max-concurrency", type=int, help="Most requests in flight.")
@click.option("--num-warmups", type=click.IntRange(0), default=1, show_default=True)
@click.option("--seed", type=int, help="Default: a fresh one, printed.")
@click.option("--ignore-eos/--no-ignore-eos", default=None, help="Default: on, off for custom.")
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--continuous-usage/--no-continuous-usage", default=True, show_default=True)
@click.option("--extra-body", metavar="JSON", help="Fields to add to each request.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds a request.")
@click.option("--reuse-connections", is_flag=True, help="Default: a connection for each request.")
@click.option(
    "--cache",
    type=click.Choice(["natural", "cold", "warm"]),
    default="natural",
    show_default=True,
    help="What to claim of the prefix cache; warm sends each prompt once beforehand.",
)
@click.option("--goodput", "slos", multiple=True, metavar="NAME:MS ...", help="ttft:1000 tpot:50")
@click.option("--percentile-metrics", metavar="NAMES", help="Latencies to print.")
@click.option("--metric-percentiles", default="50,95,99", show_default=True)
@click.option(
    "--percentile-type",
    type=click.Choice([str(kind) for kind in HYNDMAN_FAN_TYPES]),
    default="1",
    show_default=True,
    help="Hyndman and Fan's; 7 is numpy's.",
)
@click.option("--metrics/--no-metrics", default=True, help="Read the server's /metrics.")
@click.option("--max-failed-share", type=click.FloatRange(0, 1), default=0.0, show_default=True)
@click.option("--save-result", is_flag=True, help="Write the record and its rows.")
@click.option("--save-detailed", is_flag=True, help="The same, with the answers' text.")
@click.option("--result-dir", type=Path, help="Where to write it.")
@click.option("--result-filename", type=Path, help="Its name; implies --save-result.")
@click.option("--csv", "csv_file", type=Path, help="Write the figures as CSV.")
def command(**flags: Any) -> int:
    """Measure a running server under a load decided beforehand.

    The key is read from POISE_BENCH_API_KEY or OPENAI_API_KEY.
    """
    return Bench(flags).run()


@dataclass(frozen=True, slots=True)
class Bench:
    """One command line. Flags keep their names; each method reads those it is about."""

    flags: Mapping[str, Any]

    def run(self) -> int:
        """Every schedule in turn; the worst exit status."""
        self._check()
        schedules = self.schedules()
        settings = [self.settings(schedule) for schedule in schedules]
        target = uvloop.run(reach(self._target()))
        worst = 0
        for schedule, how in zip(schedules, settings, strict=True):
            status = self._run_one(schedule, target, how, alone=len(schedules) == 1)
            if status == 130:
                return status
            worst = max(worst, status)
        return worst

    def _run_one(
        self, schedule: Schedule, target: Target, settings: RunSettings, *, alone: bool
    ) -> int:
        flags = self.flags
        if flags["save_schedule"]:
            schedule.write(_numbered(flags["save_schedule"], schedule, alone))
        with LiveSummary(str(schedule.workload.get("name")), len(schedule.requests)) as live:
            record, rows = uvloop.run(run_schedule(schedule, target, settings, live.update))
        click.echo(table(record, self._shown_metrics()))
        self._save(record, rows, schedule, alone)
        if record.stopped == INTERRUPTED:
            return 130
        if not record.valid:
            click.secho(f"poise: invalid run: {verdict(record)}", fg="red", err=True)
        return 0 if record.valid else 1

    def _save(
        self, record: RunRecord, rows: list[RequestRow], schedule: Schedule, alone: bool
    ) -> None:
        flags = self.flags
        if any(flags[name] for name in ("save_result", "save_detailed", "result_filename")):
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            name = flags["result_filename"] or Path(f"poise-bench-{stamp}.json")
            path = _numbered((flags["result_dir"] or Path()) / name, schedule, alone)
            write_run(record, rows, path)
            click.echo(f"record: {path}")
        if flags["csv_file"]:
            write_csv(record, _numbered(flags["csv_file"], schedule, alone))

    def _check(self) -> None:
        """Flags that contradict each other or lead nowhere."""
        flags = self.flags
        self._shown_metrics()
        if flags["more_slos"] and not flags["slos"]:
            raise ConfigError(f"unexpected argument {flags['more_slos'][0]!r}")
        if flags["schedule_file"] and flags["workloads"]:
            raise ConfigError("--schedule and --workload: give one")
        if flags["dataset_name"] == "custom" and flags["dataset_path"] is None:
            raise ConfigError("--dataset-name custom needs --dataset-path")
        if flags["dataset_name"] != "custom" and flags["dataset_path"] is not None:
            raise ConfigError(f"--dataset-path is not read by {flags['dataset_name']}")
        if flags["timeout"] <= 0:
            raise ConfigError(f"--timeout {flags['timeout']}: a positive number of seconds")
        if flags["result_dir"] and not flags["result_dir"].is_dir():
            raise ConfigError(f"--result-dir {flags['result_dir']}: no such directory")

    def _target(self) -> Target:
        flags = self.flags
        chat = flags["backend"] == "openai-chat"
        endpoint = flags["endpoint"] or ENDPOINTS["chat" if chat else "completions"]
        if not endpoint.startswith("/"):
            raise ConfigError(f"--endpoint {endpoint!r}: a path such as /v1/completions")
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        return Target(
            clean_base_url(flags["base_url"]), endpoint, flags["model"] or "", flags["name"], key
        )

    @property
    def kind(self) -> Kind:
        return "chat" if self._target().endpoint.endswith("/chat/completions") else "completions"

    def settings(self, schedule: Schedule) -> RunSettings:
        """How to run it and what to judge it by."""
        flags = self.flags
        slos = parse_slos((*flags["slos"], *flags["more_slos"]))
        if not slos and schedule.workload.get("name") == OPEN_PRESET:
            slos = OPEN_PRESET_SLOS
        return RunSettings(
            client=ClientOptions(
                stream=flags["stream"],
                reuse_connections=flags["reuse_connections"],
                timeout_s=flags["timeout"],
                num_warmups=len(schedule.warmups),
                cache=flags["cache"],
                extra_body=_json_object(flags["extra_body"]),
            ),
            percentiles=PercentileChoice(
                _percents(flags["metric_percentiles"]), int(flags["percentile_type"])
            ),
            goodput_slos=slos,
            limits=GateLimits(failed_share=flags["max_failed_share"]),
            continuous_usage=flags["continuous_usage"],
            keep_text=flags["save_detailed"],
            scrape_metrics=flags["metrics"],
        )

    def _shown_metrics(self) -> Sequence[str]:
        text = self.flags["percentile_metrics"]
        if not text:
            return DEFAULT_METRICS
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in METRIC_NAMES:
                raise ConfigError(
                    f"--percentile-metrics {name!r}: one of {', '.join(METRIC_NAMES)}"
                )
        return names

    def schedules(self) -> list[Schedule]:
        """The schedules to run, in order, all of one seed."""
        flags = self.flags
        if flags["schedule_file"]:
            replayed = read_schedule(flags["schedule_file"])
            if replayed.kind != self.kind:
                raise ConfigError(
                    f"{flags['schedule_file']}: its prompts are for the {replayed.kind} endpoint"
                )
            return [replayed]
        seed = flags["seed"] if flags["seed"] is not None else secrets.randbits(32)
        names = flags["workloads"]
        if not names:
            return [self._drawn(seed)]
        return [
            preset_schedule(
                name,
                seed,
                self.kind,
                rate=flags["request_rate"] or OPEN_PRESET_RATE,
                seconds=flags["duration"] or OPEN_PRESET_SECONDS,
                token_range=self.token_range,
            )
            for name in (PRESET_NAMES if "all" in names else names)
        ]

    @property
    def token_range(self) -> tuple[int, int]:
        text = self.flags["token_range"]
        if text is None:
            return TOKEN_RANGE
        low, _, high = text.partition(":")
        if not low.isdigit() or not high.isdigit() or int(low) >= int(high):
            raise ConfigError(f"--token-range {text!r}: LOW:HIGH with LOW below HIGH")
        return int(low), int(high)

    def _drawn(self, seed: int) -> Schedule:
        flags = self.flags
        arrivals = self._arrivals()
        number = flags["num_prompts"]
        if number is None and (flags["duration"] is None or isinstance(arrivals, ClosedLoop)):
            number = DEFAULT_REQUESTS
        return draw_schedule(
            self._workload(),
            arrivals,
            seed,
            self.kind,
            num_requests=number,
            seconds=flags["duration"],
            num_warmups=flags["num_warmups"],
            token_range=self.token_range,
        )

    def _arrivals(self) -> Arrivals:
        """vLLM's rule: an infinite rate sends as fast as the concurrency limit allows."""
        flags = self.flags
        rate = flags["request_rate"]
        if rate is None or math.isinf(rate):
            if flags["duration"] is not None:
                raise ConfigError("--duration needs a --request-rate")
            limit = flags["max_concurrency"]
            return ClosedLoop(
                limit if limit is not None else flags["num_prompts"] or DEFAULT_REQUESTS
            )
        return OpenArrivals(rate, flags["burstiness"], flags["max_concurrency"])

    def _workload(self) -> Workload:
        flags = self.flags
        name = flags["dataset_name"]
        ignore_eos = flags["ignore_eos"] if flags["ignore_eos"] is not None else name != "custom"
        if name == "custom":
            return read_prompts(
                flags["dataset_path"],
                self._lengths("output_lengths", flags["custom_output_len"]),
                ignore_eos=ignore_eos,
                shuffle=flags["shuffle"],
            )
        if name == "prefix_repetition":
            level = TreeLevel(
                flags["prefix_repetition_prefix_len"], flags["prefix_repetition_num_prefixes"]
            )
            return PrefixTree(
                (level,),
                Constant(flags["prefix_repetition_suffix_len"]),
                Constant(flags["prefix_repetition_output_len"]),
                ignore_eos,
                self.token_range,
            )
        inputs = self._lengths("input_lengths", flags["random_input_len"])
        outputs = self._lengths("output_lengths", flags["random_output_len"])
        if name == "prefix_tree":
            if not flags["prefix_tree"]:
                raise ConfigError("--dataset-name prefix_tree needs --prefix-tree")
            levels = parse_prefix_tree(flags["prefix_tree"])
            return PrefixTree(levels, inputs, outputs, ignore_eos, self.token_range)
        prefix = flags["random_prefix_len"]
        return RandomTokens(inputs, outputs, prefix, ignore_eos, self.token_range)

    def _lengths(self, name: str, tokens: int) -> Lengths:
        """The law that was named, or vLLM's: uniform around a number of tokens."""
        law = self.flags[name]
        if law:
            return parse_lengths(law, name.replace("_lengths", "_length"))
        ratio = self.flags["random_range_ratio"]
        return ranged(tokens, ratio if self.flags["dataset_name"] != "custom" else 0.0)


def _numbered(path: Path, schedule: Schedule, alone: bool) -> Path:
    """The path itself, or with the workload's name where one command runs several."""
    return path if alone else path.with_stem(f"{path.stem}-{schedule.workload.get('name')}")


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"--extra-body {text!r}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body {text!r}: a JSON object is needed")
    return value


def _percents(text: str) -> tuple[float, ...]:
    try:
        percents = tuple(float(part) for part in text.split(","))
    except ValueError:
        percents = ()
    if not percents or not all(0.0 < percent < 100.0 for percent in percents):
        raise ConfigError(f"--metric-percentiles {text!r}: numbers between 0 and 100, by commas")
    return percents
