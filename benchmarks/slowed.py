"""Runs a server and stops its process for a share of the time: a slow-down of known size, to see whether a comparison finds it.

    python benchmarks/slowed.py 0.1 -- poise serve --port 8000

A share s of the time makes work take 1 ÷ (1 − s) as long. Stops are short (5 ms), so that every latency meets its share of them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

STOP_SECONDS = 0.005


def main(arguments: list[str]) -> int:
    """Runs the command after `--` until it ends or we are asked to."""
    share, command = float(arguments[0]), arguments[arguments.index("--") + 1 :]
    server = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while server.poll() is None:
            server.send_signal(signal.SIGSTOP)
            time.sleep(STOP_SECONDS)
            server.send_signal(signal.SIGCONT)
            time.sleep(STOP_SECONDS * (1 - share) / share)
        return server.returncode
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
