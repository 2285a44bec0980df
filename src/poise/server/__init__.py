"""The HTTP edge: OpenAI's API over an `EngineClient`. It parses once, refuses by name, and never touches a token's value."""

from poise.server.app import create_app
from poise.server.run import bind_socket, run_server

__all__ = ["bind_socket", "create_app", "run_server"]
