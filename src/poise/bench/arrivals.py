"""When requests are offered: closed loops and open arrival processes, drawn from a seeded generator.

Knows nothing of prompts. Invariant: open instants are cumulative sums of the drawn gaps, never rescaled to a round length, so
that a Poisson schedule stays Poisson.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from poise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests in flight; each end triggers the next send."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.concurrency}: at least 1")

    def describe(self) -> dict[str, Any]:
        return {"process": "closed", "concurrency": self.concurrency}


@dataclass(frozen=True, slots=True)
class OpenArrivals:
    """Requests come at `rate` a second whatever the server does.

    `burstiness` is the shape of gamma-distributed gaps, as in vLLM: 1 is Poisson, less is burstier, infinity is a constant
    rate. `max_concurrency` holds sends back once so many are in flight; from then on the loop is closed.
    """

    rate: float
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < math.inf:
            raise ConfigError(f"--request-rate {self.rate}: a positive number of requests a second")
        if not self.burstiness > 0.0:
            raise ConfigError(f"--burstiness {self.burstiness}: a positive number")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency}: at least 1")

    @property
    def process(self) -> str:
        if self.burstiness == 1.0:
            return "poisson"
        return "constant" if math.isinf(self.burstiness) else "gamma"

    def describe(self) -> dict[str, Any]:
        burstiness = None if math.isinf(self.burstiness) else self.burstiness
        return {
            "process": self.process,
            "rate": self.rate,
            "burstiness": burstiness,
            "max_concurrency": self.max_concurrency,
        }

    def gap(self, random_source: random.Random) -> float:
        """Seconds from one arrival to the next."""
        if self.process == "constant":
            return 1.0 / self.rate
        if self.process == "poisson":
            return random_source.expovariate(self.rate)
        return random_source.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))

    def instants(self, random_source: random.Random) -> Iterator[float]:
        """Endless arrival instants from the start of the run, in seconds."""
        if self.process == "constant":
            number = 0
            while True:
                yield number / self.rate
                number += 1
        now = 0.0
        while True:
            now += self.gap(random_source)
            yield now


Arrivals = ClosedLoop | OpenArrivals
