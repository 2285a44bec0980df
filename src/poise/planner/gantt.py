"""A schedule as a picture: one row for each slot, one column for each iteration; for a terminal and as SVG.

Knows timelines, not how they came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from poise.planner import svg

if TYPE_CHECKING:
    from poise.planner.schedule import Timeline

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
TERMINAL_COLUMNS = 80
MOST_ROWS = 40
HELD = "·"


def label(request: int) -> str:
    """A … Z, a … z, 0 … 9, then A1 …: one letter is drawn, the rest tells them apart."""
    turn, index = divmod(request, len(LETTERS))
    return LETTERS[index] + (str(turn) if turn else "")


def terminal(timelines: Sequence[Timeline]) -> list[str]:
    """Text rows; a column stands for several iterations where one each would be too wide."""
    longest = max((timeline.iterations for timeline in timelines), default=0)
    if longest == 0:
        return []
    per_column = -(-longest // TERMINAL_COLUMNS)
    lines = []
    for timeline in timelines:
        lines.append(f"  {timeline.name}, {timeline.iterations:,} iterations")
        lines += [f"  {row}" for row in _rows(timeline, per_column)]
    legend = f"  letters: requests; {HELD}: a slot that its batch holds; blank: free"
    if per_column > 1:
        legend += f"; a column is {per_column} iterations"
    return [*lines, legend]


def _rows(timeline: Timeline, per_column: int) -> list[str]:
    width = -(-timeline.iterations // per_column)
    used = min(timeline.slots, len(timeline.runs))
    cells = [[" "] * width for _ in range(min(used, MOST_ROWS))]
    for run in timeline.runs:
        if run.slot >= len(cells):
            continue
        for column in range(run.start // per_column, -(-run.released // per_column)):
            at_work = column * per_column < run.end
            cells[run.slot][column] = label(run.request)[0] if at_work else HELD
    digits = len(str(used))
    rows = [f"slot {slot + 1:>{digits}} |{''.join(row)}|" for slot, row in enumerate(cells)]
    if used > MOST_ROWS:
        rows.append(f"… {used - MOST_ROWS} more slots")
    return rows


def picture(timelines: Sequence[Timeline]) -> svg.Picture:
    """Both timelines above each other on one scale."""
    longest = max(1, *(timeline.iterations for timeline in timelines))
    rows = sum(min(t.slots, max(1, len(t.runs))) for t in timelines)
    row_height, left, right = 24.0, 70.0, 20.0
    width = 860.0
    drawing = svg.Picture(width, rows * row_height + len(timelines) * 58 + 46)
    scale = (width - left - right) / longest
    y = 16.0
    for timeline in timelines:
        drawing.words(left, y + 12, f"{timeline.name}: {timeline.iterations:,} iterations", size=14)
        y += 22
        y = _draw(drawing, timeline, left, y, scale, row_height)
        _axis(drawing, timeline, left, y, scale)
        y += 36
    drawing.words(left, y + 10, "grey: held by its batch, no token made", fill="#5b7083")
    return drawing


def _draw(
    drawing: svg.Picture, timeline: Timeline, left: float, top: float, scale: float, height: float
) -> float:
    used = min(timeline.slots, max(1, len(timeline.runs)))
    for slot in range(used):
        drawing.words(left - 8, top + slot * height + 15, f"slot {slot + 1}", "end")
    for run in timeline.runs:
        y = top + run.slot * height
        x, length = left + run.start * scale, (run.end - run.start) * scale
        colour = svg.COLOURS[run.request % len(svg.COLOURS)]
        drawing.rectangle(x, y + 1, length, height - 3, colour)
        if run.released > run.end:
            held = (run.released - run.end) * scale
            drawing.rectangle(x + length, y + 1, held, height - 3, svg.FAINT)
        name = f"{label(run.request)} {run.end - run.start}"
        if length > 8 * len(name):
            drawing.words(x + length / 2, y + 15, name, "middle", "#ffffff")
    return top + used * height


def _axis(drawing: svg.Picture, timeline: Timeline, left: float, y: float, scale: float) -> None:
    step = next(
        s * 10**power
        for power in range(9)
        for s in (1, 2, 5)
        if s * 10**power * scale >= 36 or s * 10**power >= 10**8
    )
    drawing.line(left, y, left + timeline.iterations * scale, y)
    for tick in range(0, timeline.iterations + 1, step):
        x = left + tick * scale
        drawing.line(x, y, x, y + 4)
        drawing.words(x, y + 16, f"{tick:,}", "middle", size=11)
