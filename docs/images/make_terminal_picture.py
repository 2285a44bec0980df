"""Makes terminal.svg: runs the commands for real and draws what they print.

Needs an installed poise beside this Python, the default model, curl, and port 8000 free:
    .venv/bin/python docs/images/make_terminal_picture.py
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_name("terminal.svg")
POISE = str(Path(sys.executable).with_name("poise"))
WIDTH = 112


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    generate = ["generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    show(console, 'poise generate "The capital of France is" --max-tokens 8 --temperature 0')
    console.print(Text(output_of(POISE, *generate)))
    show(console, "poise serve")
    server = subprocess.Popen(
        [POISE, "serve"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    curl = ""
    for line in server.stdout:
        console.print(Text(line.rstrip()))
        if line.startswith("curl "):
            curl = line.strip()
            break
    answer = output_of("sh", "-c", f"{curl} 2>/dev/null")
    server.send_signal(signal.SIGTERM)
    _, log = server.communicate(timeout=60)
    console.print(Text(log.strip(), style="cyan"))
    console.print()
    show(console, "curl … (as printed above)")
    console.print(Text(answer))
    svg = console.export_svg(title="poise, LLM serving")
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


def show(console: Console, command: str) -> None:
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
