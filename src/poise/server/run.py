"""Binds the port, runs the server, and ends it: refuse, let answers finish, abort the rest, close the engine.

Invariant: SIGTERM and Ctrl-C make `run_server` return normally (exit status 0), with the engine closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette

from poise.errors import ConfigError
from poise.server.door import Door
from poise.server.http_protocol import BoundedHttpProtocol
from poise.server.state import ServerState

logger = logging.getLogger("poise.server")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
KEEP_ALIVE_SECONDS = (
    75  # longer than clients keep idle connections, so that they close them, not we
)
FLUSH_SECONDS = 5  # for answers to be written after the engine has ended them
ENGINE_CLOSE_SECONDS = 30.0


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket; call it before loading a model. Raises ConfigError in one line.

    Connections wait in its backlog until the server runs.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}, expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} can't be resolved ({error}); try 127.0.0.1") from None
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(_why_not_bound(error, host, port)) from None
    bound.setblocking(False)
    return bound


def _why_not_bound(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop the other server or choose another with --port"
        )
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {port}; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host} isn't an address of this machine; try 127.0.0.1 or 0.0.0.0"
    return f"can't listen on {host} port {port}: {error.strerror}"


class Server(uvicorn.Server):
    """uvicorn's server with our way to end; `serve` takes SIGTERM and Ctrl-C while it runs in the main thread.

    It listens while the app is still being made (see `Door`).
    """

    def __init__(
        self,
        making: asyncio.Future[Starlette],
        shutdown_timeout: float,
        on_started: Callable[[], None] | None,
        reloads: bool = False,
    ) -> None:
        """`reloads`: SIGHUP has the tenants file read again (else it ends the process, as it does by default)."""
        self._door = Door()
        self._reloads = reloads
        self._hung_up = False  # a SIGHUP came while there was no app
        self._tasks: set[asyncio.Task[None]] = set()
        config = uvicorn.Config(
            self._door,
            loop="uvloop",
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            backlog=BACKLOG,
        )
        super().__init__(config)
        self._making = making
        self._shutdown_timeout = shutdown_timeout
        self._on_started = on_started
        making.add_done_callback(self._made)

    @property
    def _state(self) -> ServerState | None:
        """The app's state, None while there is no app."""
        app = self._door.app
        state: ServerState | None = None if app is None else app.state.server
        return state

    def _made(self, making: asyncio.Future[Starlette]) -> None:
        if making.cancelled() or making.exception() is not None:
            self._door.give_up()
            self.should_exit = True
            return
        self._door.open(making.result())
        if self._hung_up:
            self.reload()
        if self._on_started is not None:
            self._on_started()

    def reload(self) -> None:
        """Has the tenants file read again."""
        if self._state is None:
            self._hung_up = True
            return
        task = asyncio.ensure_future(self._state.reload_tenants())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Begins the end; a second call ends it at once."""
        self.force_exit = self.should_exit
        self._making.cancel()
        if self._state is not None:
            self._state.draining = True
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but a signal isn't raised again after a clean end, which is exit status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        loop = asyncio.get_running_loop()
        if self._reloads:
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            if self._reloads:
                loop.remove_signal_handler(signal.SIGHUP)
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """While answers finish we still listen, so that /ready and new requests read "draining"."""
        if self._state is not None:
            await self._drain(self._state)
        await super().shutdown(sockets)

    async def _drain(self, state: ServerState) -> None:
        state.draining = True
        deadline = asyncio.get_running_loop().time() + self._shutdown_timeout
        while state.num_answering and not self.force_exit:
            if asyncio.get_running_loop().time() >= deadline:
                logger.warning("aborting %d answers", state.num_answering)
                break
            await asyncio.sleep(0.05)
        try:
            async with asyncio.timeout(ENGINE_CLOSE_SECONDS):
                await state.client.close()
        except TimeoutError:
            logger.error("the engine didn't close within %g s", ENGINE_CLOSE_SECONDS)


def run_server(
    make_app: Callable[[], Awaitable[Starlette]],
    bound: socket.socket,
    *,
    shutdown_timeout: float = 0.0,
    on_started: Callable[[], None] | None = None,
    reloads: bool = False,
) -> None:
    """Makes the app on the server's event loop and serves until SIGTERM or Ctrl-C, then returns.

    `make_app` may load a model first: /health and /ready are answered meanwhile, other requests wait for it, a signal cancels
    it, an error of its own is raised from here. Answers get `shutdown_timeout` seconds to finish, then end with finish reason
    abort; a second signal doesn't wait. `on_started` is called once the app is there. `reloads`: SIGHUP has the tenants file read again.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(make_app, bound, shutdown_timeout, on_started, reloads))


async def _serve(
    make_app: Callable[[], Awaitable[Starlette]],
    bound: socket.socket,
    shutdown_timeout: float,
    on_started: Callable[[], None] | None,
    reloads: bool,
) -> None:
    making: asyncio.Future[Starlette] = asyncio.ensure_future(make_app())
    server = Server(making, shutdown_timeout, on_started, reloads)
    await server.serve(sockets=[bound])
    if making.done() and not making.cancelled() and (error := making.exception()) is not None:
        raise error
