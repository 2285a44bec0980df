"""What it costs at least to hand one thing to an event loop and to write it to a connection, where nothing else is done.

    python benchmarks/event_loop.py

A thread posts an event after each sweep over memory, as an engine does after each step; the loop does nothing with it, or writes
200 bytes to a client on the loopback that another process reads. No server of that kind spends less per token of one stream.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from records import write_record

PAUSE = 0.005  # s, where nothing is swept
PART = b"x" * 200


def read_all(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        while connection.recv(1 << 16):
            pass


async def measure(num_events: int, swept_mib: int, writes: bool) -> dict[str, float]:
    """CPU microseconds per event: of the loop's thread, and of the call that posts an event."""
    loop = asyncio.get_running_loop()
    all_done = loop.create_future()
    swept = np.ones(swept_mib << 20, np.uint8)  # written, so that each page is memory of its own
    posting: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reader = multiprocessing.get_context("spawn").Process(
            target=read_all, args=(listening.getsockname(),), daemon=True
        )
        reader.start()
        accepted, _ = listening.accept()
    accepted.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)

    def take(index: int) -> None:
        if writes:
            transport.write(PART)
        if index == num_events - 1:
            all_done.set_result(None)

    def post_all() -> None:
        for index in range(num_events):
            if swept_mib:
                swept.sum()  # without the GIL
            else:
                time.sleep(PAUSE)
            begin = time.thread_time_ns()
            loop.call_soon_threadsafe(take, index)
            posting.append(time.thread_time_ns() - begin)

    poster = threading.Thread(target=post_all)
    begin = time.thread_time_ns()
    poster.start()
    await all_done
    taking = time.thread_time_ns() - begin
    poster.join()
    transport.close()
    await asyncio.sleep(0)
    reader.join()
    return {"loop_us": taking / num_events / 1e3, "post_us": statistics.mean(posting) / 1e3}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sweep", type=int, default=64, help="MiB")
    parser.add_argument("--output", type=Path, help="default: docs/records/event-loop-TIME.json")
    options = parser.parse_args()
    cases = [(sweep, writes) for sweep in (0, options.sweep) for writes in (False, True)]
    runs: list[dict[str, Any]] = []
    for repetition in range(options.repeat):
        for sweep, writes in cases:
            figures = uvloop.run(measure(options.events, sweep, writes))
            runs.append({"repetition": repetition, "swept_mib": sweep, "writes": writes, **figures})
    for sweep, writes in cases:
        chosen = [r for r in runs if (r["swept_mib"], r["writes"]) == (sweep, writes)]
        loop, post = (statistics.median(r[name] for r in chosen) for name in ("loop_us", "post_us"))
        print(
            f"{sweep} MiB swept, {'written' if writes else 'nothing done'}: loop {loop:.0f} µs, posting {post:.0f} µs"
        )
    target = write_record("event-loop", {"events": options.events, "runs": runs}, options.output)
    print(f"record: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
