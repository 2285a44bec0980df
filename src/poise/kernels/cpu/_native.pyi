"""
Native CPU backend: packed weights, paged KV, plans replayed by a pool of workers.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

def available_isas() -> list[str]:
    """
    Instruction sets that this build holds and this CPU runs, slowest first.
    """

def max_tile(isa: str) -> int:
    """Rows of a full tile."""

def sample_rows(
    logits: Annotated[
        NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    rows: Annotated[
        NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    isa: str,
) -> bytes: ...
def philox(seed: int, block: int, position: int, choice: int, stream: int, isa: str) -> list[int]: ...
def sampling_row_fields() -> list[tuple[str, int, str]]: ...
def sampling_result_fields() -> list[tuple[str, int, str]]: ...

SAMPLING_ROW_BYTES: int = 128

SAMPLING_RESULT_BYTES: int = 180

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Arena:
    def __init__(self) -> None: ...
    @property
    def used_bytes(self) -> int: ...

class ProbeBuffer:
    """Memory of one page size, written once."""

    def __init__(self, bytes: int, huge_pages: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...

def probe_read(pool: Pool, isa: str, buffer: ProbeBuffer, ahead: int) -> float:
    """Seconds to read the buffer once, all workers together."""

def probe_products(pool: Pool, isa: str, kind: str, rounds: int) -> float:
    """
    Multiplications and additions per second of products on registers: kind int8, bf16 or f32, all workers together.
    """

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

class Vector:
    @property
    def size(self) -> int: ...

def pack(
    pool: Pool,
    arena: Arena,
    type: str,
    data: Annotated[
        NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
    ],
    cols: int,
    row_order: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ]
    | None,
    activations: str = "int8",
) -> Matrix: ...
def vector(
    arena: Arena,
    values: Annotated[
        NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> Vector: ...

class Pages:
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        type: str = "bf16",
    ) -> None: ...
    def shared_with(self, num_layers: int, num_kv_heads: int, head_dim: int) -> Pages:
        """The same memory, laid out for the layers of another model."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def fill(self, block: int, byte: int) -> None:
        """Fills a page with a byte: tests poison recycled pages so."""

    def populate(self, first: int, count: int) -> None:
        """
        Has the system find memory for these blocks now, not at their first write; changes no content.
        """

    def view(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]:
        """uint8 [blocks, bytes per page]: the pages themselves."""

class Plan:
    def __init__(
        self, pool: Pool, isa: str, max_rows: int, logit_tile: int, pages: Pages
    ) -> None: ...
    def buffer(self, width: int) -> int: ...
    def buffer_view(
        self, index: int, rows: int
    ) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...
    def embed(self, table: object, scale: float, out: int) -> None: ...
    def norm_linear(
        self,
        x: int,
        norm: object,
        eps: float,
        weights: Sequence[object],
        biases: Sequence[object],
        out: int,
    ) -> None: ...
    def rope_kv_write(
        self,
        qkv: int,
        inverse_frequencies: object,
        layer: int,
        num_heads: int,
        q_norm: object | None,
        k_norm: object | None,
        eps: float,
        q_scale: float,
        out: int,
        table: int,
    ) -> None: ...
    def attention(
        self, q: int, layer: int, num_heads: int, out: int, table: int, window: int
    ) -> None: ...
    def linear_residual(
        self, a: int, weight: object, x: int, post_norm: object | None, eps: float, product: int
    ) -> None: ...
    def gated_mlp(
        self,
        x: int,
        norm: object,
        eps: float,
        gate: object,
        up: object,
        down: object,
        gelu: bool,
        post_norm: object | None,
        product: int,
    ) -> None: ...
    def logits(self, x: int, norm: object, eps: float, output: object) -> None: ...
    @property
    def profiling(self) -> bool:
        """Whether each run stamps its operations."""
    @profiling.setter
    def profiling(self, arg: bool, /) -> None: ...
    @property
    def share_prefixes(self) -> bool:
        """
        Whether attention reads whole splits that lie on the same blocks in several sequences once for all of them.
        """
    @share_prefixes.setter
    def share_prefixes(self, arg: bool, /) -> None: ...
    @property
    def spared_keys(self) -> list[int]:
        """
        By block table: keys that sequences of the last run did not read for themselves, as another one's pass served them.
        """
    @property
    def first_of_wanted(self) -> int:
        """
        The first operation that only rows whose logits are asked for go through; the number of operations where there is none.
        """
    @property
    def operation_names(self) -> list[str]: ...
    @property
    def operation_times(self) -> list[int]:
        """
        Monotonic ns before the first operation of the last profiled run, then behind each one.
        """
    @property
    def worker_waits(self) -> list[int]:
        """
        ns that each worker of the last profiled run waited for the others.
        """
    def run(
        self,
        token_ids: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        positions: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        query_start: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        block_tables: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        logit_rows: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        sampling: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
        | None,
        results: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
        | None,
        logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")]
        | None = None,
    ) -> None: ...
