"""KV memory: bytes per token, per sequence and for all of them, in the pages that the engine would take; and what fits.

Knows layers, blocks and budgets, no machines. Invariant: pages are counted by the engine's own `KVCacheManager` over the groups
that the engine makes of the same layers, so the figures are what it would allocate, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from poise.config import SchedulerConfig
from poise.core.kv_cache_manager import KVCacheManager
from poise.errors import ConfigError
from poise.models import cost
from poise.models.config import ModelConfig
from poise.planner.report import Column, Report, Table, Unit, number

BLOCK_SIZES = (16, 32, 64)
LONGEST = 2**40


@dataclass(frozen=True, slots=True)
class KVLayers:
    """Layers that keep KV, by window (None: full), and `num_shared` that use another layer's and keep none."""

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    num_shared: int = 0

    @classmethod
    def of(cls, config: ModelConfig, dtype: str = "bf16") -> KVLayers:
        return cls(cost.layer_windows(config), config.num_kv_heads, config.head_dim, dtype)

    @property
    def format(self) -> cost.KVFormat:
        return cost.KV_FORMATS[self.dtype]

    @property
    def layer_token_bytes(self) -> float:
        """2 (K and V) · KV heads · (head_dim · bytes of a value + bytes of a scale)."""
        return 2 * self.num_kv_heads * self.format.head_bytes(self.head_dim)

    @property
    def token_bytes(self) -> float:
        """Of a token that every layer still sees."""
        return len(self.windows) * self.layer_token_bytes

    def sequence_bytes(self, num_tokens: int) -> float:
        """Of what a sequence of `num_tokens` can still see; no blocks."""
        return self.layer_token_bytes * sum(
            num_tokens if window is None else min(window, num_tokens) for window in self.windows
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """How the engine cuts these layers' KV into equal pages. `chunk`: most tokens of a sequence in one step."""

    layers: KVLayers
    block_size: int
    chunk: int

    @property
    def page_bytes(self) -> float:
        num_layers = cost.kv_groups(self.layers.windows).layers_per_page
        return num_layers * self.layers.layer_token_bytes * self.block_size

    def blocks(self, num_tokens: int) -> int:
        """The most pages that one sequence holds on its way to `num_tokens`, over all groups."""
        groups = cost.kv_groups(self.layers.windows)
        manager = KVCacheManager(groups.specs, 1, self.block_size, None)
        return manager.num_blocks_needed(num_tokens, self.chunk)

    def blocks_of_all(self, num_tokens: int, num_sequences: int, prefix: int) -> int:
        """Of sequences that begin with the same `prefix` tokens: whole blocks of it are held once, in full groups."""
        groups = cost.kv_groups(self.layers.windows)
        full = sum(group.sliding_window is None for group in groups.specs)
        shared = full * (min(prefix, num_tokens - 1) // self.block_size)
        return shared + num_sequences * (self.blocks(num_tokens) - shared)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be held. `weights` and `workspace` in bytes with how they are known, None where nobody said."""

    num_tokens: int
    num_sequences: int
    shared_prefix: int = 0
    weights: tuple[int, str] | None = None
    workspace: tuple[int, str] | None = None
    memory: int | None = None
    context: int | None = None  # the model's own limit


def check_shape(
    name: str,
    config: ModelConfig,
    num_layers: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
) -> None:
    """Refuses numbers given beside a model that contradict it; query heads in place of KV heads are named as such."""
    if num_kv_heads not in (None, config.num_kv_heads):
        if num_kv_heads == config.num_heads:
            raise ConfigError(
                f"--kv-heads {num_kv_heads} is the number of query heads of {name}; it has "
                f"{config.num_kv_heads} KV heads, so the cache would come out "
                f"{config.num_heads / config.num_kv_heads:g} times too large"
            )
        raise ConfigError(f"--kv-heads is {num_kv_heads}, {name} has {config.num_kv_heads}")
    for flag, given, own in (
        ("--layers", num_layers, config.num_layers),
        ("--head-dim", head_dim, config.head_dim),
    ):
        if given not in (None, own):
            raise ConfigError(f"{flag} is {given}, {name} has {own}; leave it out")


def plan(subject: str, layers: KVLayers, block_size: int, demand: Demand) -> Report:
    """The report. `subject` names the model, or the shape that was given."""
    if demand.shared_prefix > demand.num_tokens:
        raise ConfigError(
            f"--shared-prefix is {demand.shared_prefix}, longer than --tokens {demand.num_tokens}"
        )
    pages = Pages(layers, block_size, SchedulerConfig().max_num_batched_tokens)
    report = Report(
        "kv",
        f"KV cache of {subject}, {layers.dtype}, {demand.num_sequences:,} "
        f"sequence{'s' * (demand.num_sequences != 1)} of {demand.num_tokens:,} tokens",
    )
    add_token_figure(report, layers)
    _sequence_figures(report, layers, pages, demand)
    _total_figures(report, pages, demand)
    report.tables.append(_kinds(layers, demand.num_tokens))
    report.tables.append(_block_sizes(pages, demand.num_tokens))
    _notes(report, layers, demand)
    return report


def add_token_figure(
    report: Report,
    layers: KVLayers,
    name: str = "kv_bytes_per_token",
    label: str = "KV of a token",
) -> None:
    """The line that `poise inspect` shows too, for each type of KV."""
    heads, dim, kept = layers.num_kv_heads, layers.head_dim, layers.format
    words, numbers = "head_dim · bytes", f"{dim} · {kept.value_bytes:g}"
    if kept.scale_bytes:
        words, numbers = f"({words} + scale)", f"({numbers} + {kept.scale_bytes})"
    report.add(
        name, label, _exact(layers.token_bytes), Unit.BYTES_PER_TOKEN,
        f"2 (K and V) · layers · KV heads · {words} = 2 · {len(layers.windows)} · {heads} · {numbers}",
    )  # fmt: skip


def add_weights_figure(report: Report, num_bytes: int, equation: str) -> None:
    """The line that `poise inspect` shows too."""
    report.add("weight_bytes", "weights", num_bytes, Unit.BYTES, equation)


def add_sequence_figure(
    report: Report, layers: KVLayers, num_tokens: int, name: str = "kv_bytes_per_sequence"
) -> None:
    """The line that `poise inspect` shows too, for 1,000 tokens and for the model's whole context."""
    report.add(
        name, f"KV of {num_tokens:,} tokens",
        _exact(layers.sequence_bytes(num_tokens)), Unit.BYTES_PER_SEQUENCE,
        f"{number(layers.layer_token_bytes)} B/token · Σ over layers of min(tokens, window)"
        if any(window is not None for window in layers.windows)
        else f"{number(layers.token_bytes)} B/token · {num_tokens} tokens",
    )  # fmt: skip


def _sequence_figures(report: Report, layers: KVLayers, pages: Pages, demand: Demand) -> None:
    tokens = demand.num_tokens
    seen = layers.sequence_bytes(tokens)
    add_sequence_figure(report, layers, tokens)
    blocks = pages.blocks(tokens)
    held = blocks * pages.page_bytes
    slides = any(window is not None for window in layers.windows)
    report.add(
        "blocks_per_sequence", "in blocks", blocks, Unit.BLOCKS_PER_SEQUENCE,
        f"⌈{tokens} tokens / {pages.block_size} tokens/block⌉ in each of "
        f"{len(cost.kv_groups(layers.windows).specs)} groups; behind a window no more than the window, "
        f"a chunk of {pages.chunk} and two" if slides
        else f"⌈{tokens} tokens / {pages.block_size} tokens/block⌉",
    )  # fmt: skip
    report.add(
        "allocated_bytes_per_sequence", "allocated", _exact(held), Unit.BYTES_PER_SEQUENCE,
        f"{blocks} blocks · {number(pages.page_bytes)} B/block",
    )  # fmt: skip
    report.add(
        "waste_bytes_per_sequence", "of that unused", _exact(held - seen), Unit.BYTES_PER_SEQUENCE,
        "allocated − KV of a sequence: the tail of the last block" + (", and slack behind windows" if slides else ""),
    )  # fmt: skip


def _total_figures(report: Report, pages: Pages, demand: Demand) -> None:
    blocks = pages.blocks_of_all(demand.num_tokens, demand.num_sequences, demand.shared_prefix)
    seen = pages.layers.sequence_bytes(demand.num_tokens) * demand.num_sequences
    if not demand.shared_prefix:
        report.add(
            "kv_bytes", "KV of all", _exact(seen), Unit.BYTES,
            f"{demand.num_sequences} sequences · KV of a sequence",
        )  # fmt: skip
    held = blocks * pages.page_bytes
    per_sequence = pages.blocks(demand.num_tokens)
    saved = demand.num_sequences * per_sequence - blocks
    report.add(
        "allocated_bytes", "allocated for all", _exact(held), Unit.BYTES,
        f"{blocks} blocks · {number(pages.page_bytes)} B/block"
        + (f", whole blocks of the first {demand.shared_prefix} tokens held once" if saved else ""),
    )  # fmt: skip
    if demand.shared_prefix:
        report.add(
            "saved_bytes", "saved by the prefix", _exact(saved * pages.page_bytes), Unit.BYTES,
            f"{saved} blocks · {number(pages.page_bytes)} B/block",
        )  # fmt: skip
    total = held
    if demand.weights is not None:
        add_weights_figure(report, *demand.weights)
        total += demand.weights[0]
    if demand.workspace is not None:
        report.add(
            "workspace_bytes", "workspace", demand.workspace[0], Unit.BYTES, demand.workspace[1]
        )
        total += demand.workspace[0]
    parts = [held, *(part[0] for part in (demand.weights, demand.workspace) if part is not None)]
    if len(parts) > 1:
        report.add("total_bytes", "together", _exact(total), Unit.BYTES, "allocated for all + the two above"
                   if len(parts) == 3 else "allocated for all + the one above")  # fmt: skip
    if demand.memory is not None:
        _fit_figures(report, pages, demand, demand.memory - (total - held))


def _fit_figures(report: Report, pages: Pages, demand: Demand, room: float) -> None:
    """`room`: bytes left for KV."""
    assert demand.memory is not None
    report.add("memory_bytes", "memory", demand.memory, Unit.BYTES, "as given")
    report.add(
        "room_bytes", "room for KV", _exact(max(0.0, room)), Unit.BYTES, "memory − weights − workspace"
    )  # fmt: skip
    room_blocks = max(0, int(room // pages.page_bytes))
    tokens, count, prefix = demand.num_tokens, demand.num_sequences, demand.shared_prefix
    limit = demand.context or LONGEST
    longest = _most(lambda n: pages.blocks_of_all(n, count, min(prefix, n)) <= room_blocks, limit)
    at_limit = longest == limit
    report.add(
        "longest_context", "longest context", longest, Unit.TOKENS_PER_SEQUENCE,
        f"the most tokens of each of {count} sequences whose blocks fit"
        + (", cut off at the model's own context" if at_limit and demand.context else ""),
    )  # fmt: skip
    report.add(
        "most_sequences", "most sequences", _most(lambda n: pages.blocks_of_all(tokens, n, prefix) <= room_blocks, LONGEST),
        Unit.SEQUENCES, f"the most sequences of {tokens} tokens whose blocks fit",
    )  # fmt: skip


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n in 0 … limit with fits(n), by halving; fits must not turn true again."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _kinds(layers: KVLayers, num_tokens: int) -> Table:
    columns = [
        Column("kind", "kind", Unit.WORD),
        Column("layers", "count", Unit.LAYERS),
        Column("bytes_per_token", "a token", Unit.BYTES_PER_TOKEN),
        Column("tokens_seen", "sees", Unit.TOKENS),
        Column("bytes_per_sequence", "a sequence", Unit.BYTES_PER_SEQUENCE),
    ]
    rows: list[list[int | float | str | None]] = []
    for window, count in cost.kinds_of_layers(layers.windows).items():
        seen = num_tokens if window is None else min(window, num_tokens)
        per_token = count * layers.layer_token_bytes
        kind = "full" if window is None else f"sliding window of {window:,}"
        rows.append([kind, count, _exact(per_token), seen, _exact(per_token * seen)])
    if layers.num_shared:
        rows.append(["shared (use another layer's)", layers.num_shared, 0, None, 0])
    return Table(
        "kinds", "By kind of layer", columns, rows,
        "a token = 2 · layers · KV heads · bytes of a head; a sequence = a token · tokens seen",
    )  # fmt: skip


def _block_sizes(pages: Pages, num_tokens: int) -> Table:
    columns = [
        Column("block_size", "block size", Unit.TOKENS_PER_BLOCK),
        Column("blocks", "blocks", Unit.BLOCKS_PER_SEQUENCE),
        Column("page_bytes", "a block", Unit.BYTES_PER_BLOCK),
        Column("waste_bytes", "unused", Unit.BYTES_PER_SEQUENCE),
        Column("waste_share", "unused", Unit.PERCENT),
    ]
    rows = []
    for size in sorted({*BLOCK_SIZES, pages.block_size}):
        sized = Pages(pages.layers, size, pages.chunk)
        blocks = sized.blocks(num_tokens)
        held = blocks * sized.page_bytes
        waste = held - pages.layers.sequence_bytes(num_tokens)
        rows.append([size, blocks, _exact(sized.page_bytes), _exact(waste), 100 * waste / held])
    return Table(
        "block_sizes",
        "By block size",
        columns,
        rows,
        "unused = blocks · a block − KV of a sequence",
    )


def _notes(report: Report, layers: KVLayers, demand: Demand) -> None:
    report.notes.append(
        'GiB, MiB and KiB are powers of 1024; GB, MB and kB are powers of 1000. A memory of "80 GB" may mean either: ask.'
    )
    if layers.format.value_bytes < 2 and not layers.format.scale_bytes:
        report.notes.append(f"Scales of {layers.dtype} are not counted.")
    if demand.shared_prefix and any(window is not None for window in layers.windows):
        report.notes.append(
            "Sharing is counted for full attention only; windows slide off the prefix."
        )
    if demand.weights is None:
        report.notes.append(
            "Weights and workspace are not counted: no model and no --weights given."
        )


def _exact(value: float) -> int | float:
    """Whole bytes as a whole number (only int4 can give halves)."""
    return int(value) if value == int(value) else value
