"""Pictures as SVG text: rectangles, lines, dots and words, enough for a plot and a Gantt chart.

Knows nothing of what is drawn. Invariant: every text is escaped, so a picture is well-formed XML whatever it says.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from poise.errors import ConfigError

INK = "#1f2933"
FAINT = "#c9d1d9"
COLOURS = ("#2f6fb5", "#d9822b", "#3a8f5c", "#a14f9b", "#c0453c", "#5b7083")


class Picture:
    """Elements in the order in which they are drawn; the origin is the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._elements: list[str] = []
        self._width, self._height = width, height
        self.rectangle(0, 0, width, height, "#ffffff")

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self._element("rect", x=x, y=y, width=width, height=height, fill=fill)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, width: float = 1
    ) -> None:
        self._element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width)

    def dot(self, x: float, y: float, fill: str, radius: float = 4.5) -> None:
        self._element("circle", cx=x, cy=y, r=radius, fill=fill)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        fill: str = INK,
        size: float = 12,
    ) -> None:
        """`anchor`: start, middle or end of the text at (x, y), y its baseline."""
        self._element("text", text, x=x, y=y, text_anchor=anchor, fill=fill, font_size=size)

    def _element(self, tag: str, text: str | None = None, **attributes: float | str) -> None:
        written = " ".join(
            f"{name.replace('_', '-')}={quoteattr(f'{value:.2f}' if isinstance(value, float) else str(value))}"
            for name, value in attributes.items()
        )
        end = "/>" if text is None else f">{escape(text)}</{tag}>"
        self._elements.append(f"<{tag} {written}{end}")

    def text(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width:g} {self._height:g}" '
            f'width="{self._width:g}" height="{self._height:g}" font-family="sans-serif">'
        )
        return "\n".join([head, *self._elements, "</svg>", ""])


def write(path: Path, picture: Picture) -> None:
    """Writes the file. Raises ConfigError where that is not possible."""
    try:
        path.write_text(picture.text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {path}: {error.strerror}") from None
