"""The roofline as a picture: both axes logarithmic, a roof for each machine, a dot for each step under its roof.

Knows figures, not where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from poise.errors import ConfigError
from poise.planner import svg
from poise.planner.hardware import Machine
from poise.planner.report import OPTIMISTIC
from poise.planner.roofline import Costs, Options, Step

LEFT, TOP, WIDTH, HEIGHT = 78.0, 40.0, 640.0, 380.0


class Axes:
    """Positions of (FLOP/B, FLOP/s) on the page."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._x = (math.floor(math.log10(x_range[0])), math.ceil(math.log10(x_range[1])))
        self._y = (math.floor(math.log10(y_range[0])), math.ceil(math.log10(y_range[1])))

    def x(self, value: float) -> float:
        low, high = self._x
        return LEFT + WIDTH * (math.log10(value) - low) / max(1, high - low)

    def y(self, value: float) -> float:
        low, high = self._y
        return TOP + HEIGHT * (1 - (math.log10(value) - low) / max(1, high - low))

    @property
    def x_low(self) -> float:
        return 10.0 ** self._x[0]

    @property
    def x_high(self) -> float:
        return 10.0 ** self._x[1]

    def draw(self, drawing: svg.Picture) -> None:
        for power in range(self._x[0], self._x[1] + 1):
            x = self.x(10.0**power)
            drawing.line(x, TOP, x, TOP + HEIGHT, svg.FAINT)
            drawing.words(x, TOP + HEIGHT + 18, _power(power), "middle")
        for power in range(self._y[0], self._y[1] + 1):
            y = self.y(10.0**power)
            drawing.line(LEFT, y, LEFT + WIDTH, y, svg.FAINT)
            drawing.words(LEFT - 8, y + 4, _power(power), "end")
        drawing.words(LEFT + WIDTH / 2, TOP + HEIGHT + 40, "intensity (FLOP/B)", "middle")
        drawing.words(LEFT - 8, TOP - 12, "FLOP/s", "end")


def picture(
    costs: Costs, machines: Sequence[Machine], steps: Sequence[Step], options: Options
) -> svg.Picture:
    """Raises ConfigError for a machine whose peak is not known: it has no roof."""
    peaks = []
    for machine in machines:
        peak = machine.peak(options.compute)
        if peak is None:
            raise ConfigError(f"--svg needs the peak of {machine.name}: give --peak")
        peaks.append(peak)
    intensities = [costs.step(step).intensity for step in steps]
    ridges = [peak / machine.bandwidth for peak, machine in zip(peaks, machines, strict=True)]
    x_range = (min(intensities) / 2, max(*intensities, *ridges) * 4)
    x_low = 10.0 ** math.floor(math.log10(x_range[0]))
    slowest = min(machine.bandwidth for machine in machines) * x_low
    axes = Axes(x_range, (slowest, max(peaks)))
    drawing = svg.Picture(LEFT + WIDTH + 24, TOP + HEIGHT + 58 + 18 * len(machines))
    drawing.words(LEFT, 18, f"{costs.name} ({OPTIMISTIC})", size=14)
    axes.draw(drawing)
    for index, (machine, peak) in enumerate(zip(machines, peaks, strict=True)):
        colour = svg.COLOURS[index % len(svg.COLOURS)]
        _roof(drawing, axes, machine.bandwidth, peak, colour)
        for step, intensity in zip(steps, intensities, strict=True):
            height = min(peak, machine.bandwidth * intensity)
            drawing.dot(axes.x(intensity), axes.y(height), colour)
            if index == 0:
                _name(drawing, axes.x(intensity), axes.y(height), step)
        y = TOP + HEIGHT + 62 + 18 * index
        drawing.line(LEFT, y, LEFT + 24, y, colour, 2.5)
        drawing.words(LEFT + 32, y + 4, machine.title)
    return drawing


def _roof(drawing: svg.Picture, axes: Axes, bandwidth: float, peak: float, colour: str) -> None:
    ridge = peak / bandwidth
    start = axes.x_low
    drawing.line(axes.x(start), axes.y(bandwidth * start), axes.x(ridge), axes.y(peak), colour, 2.5)
    drawing.line(axes.x(ridge), axes.y(peak), axes.x(axes.x_high), axes.y(peak), colour, 2.5)


def _name(drawing: svg.Picture, x: float, y: float, step: Step) -> None:
    """Beside its dot, below the slope; a prefill's stands under the roof."""
    what = step.num_sequences if step.phase == "decode" else step.rows
    drawing.words(x + 8, y + 16, f"{step.phase} {what:,}", size=11)


def _power(power: int) -> str:
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"
