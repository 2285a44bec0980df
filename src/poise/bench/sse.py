"""An incremental parser of server-sent events (WHATWG HTML, section 9.2.6): bytes in, data of whole events out.

Knows no JSON and no OpenAI. Invariant: the events do not depend on where the reads cut the stream.
"""

from __future__ import annotations

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventParser:
    """Feed it reads in order; lines may end in LF, CRLF or CR, events may hold several data lines and comments."""

    __slots__ = ("_after_carriage_return", "_at_start", "_data", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that has not ended yet
        self._data: list[bytes] = []  # data lines of the event that has not ended yet
        self._after_carriage_return = False
        self._at_start = True

    def feed(self, read: bytes) -> list[bytes]:
        """Data of each event that ends in this read; an event without data is not one."""
        if self._after_carriage_return and read:
            if read[0] == 0x0A:
                read = read[1:]
            self._after_carriage_return = False
        if b"\r" in read:
            self._after_carriage_return = read[-1] == 0x0D
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in read:
            if read:
                self._parts.append(read)
            return []
        lines = read.split(b"\n")
        if self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
        rest = lines.pop()
        self._parts = [rest] if rest else []
        return self._events(lines)

    def finish(self) -> list[bytes]:
        """Data of the event that the end of the stream cuts off before its blank line, if there is one."""
        events = self.feed(b"\n\n") if self._parts or self._data else []
        self._parts = []
        self._data = []
        return events

    def _events(self, lines: list[bytes]) -> list[bytes]:
        events = []
        if self._at_start:
            self._at_start = False
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        for line in lines:
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
        return events
