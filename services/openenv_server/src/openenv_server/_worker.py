"""A process that serves connections: `python -m openenv_server._worker LINK SOCKET...`.

The supervisor starts it. The numbers are inherited descriptors, the settings come over standard
input. Signals are the supervisor's business; the worker ends when the link to it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Generator

import uvicorn

from openenv_server._admission_link import RemoteAdmissionQueue
from openenv_server._logs import configure_logs, flush_logs
from openenv_server.app import make_app
from openenv_server.settings import Settings

_BACKLOG = 2048
_ACCEPT_AT_ONCE = 8
_CLOSE_S = 3  # for the sessions; the supervisor kills 2 s later


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, admission: RemoteAdmissionQueue) -> None:
        super().__init__(config)
        self._admission = admission

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts as many connections at once as the backlog it was given: few, so that a
        # burst spreads over the workers. The kernel's queue must be long all the same.
        for sock in sockets or []:
            sock.listen(_BACKLOG)
        self._admission.ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _serve(settings: Settings, link: socket.socket, sockets: list[socket.socket]) -> None:
    def stop() -> None:
        server.should_exit = True

    admission = RemoteAdmissionQueue(stop)
    config = uvicorn.Config(
        make_app(settings, admission=admission),
        lifespan="on",
        log_config=None,
        access_log=False,
        backlog=_ACCEPT_AT_ONCE,
        timeout_graceful_shutdown=_CLOSE_S,
        ws="websockets-sansio",
        ws_max_size=settings.max_message_bytes,
        ws_ping_interval=settings.ping_interval_s,
        ws_ping_timeout=settings.ping_timeout_s,
        ws_per_message_deflate=False,
    )
    server = _Server(config, admission)
    await admission.connect(link)
    await server.serve(sockets=sockets)


def _ignore(*_: object) -> None:
    pass


def main() -> None:
    """Serve until the supervisor says stop."""
    # Not SIG_IGN, which the programs of the sessions would inherit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    settings = Settings.model_validate_json(sys.stdin.read())
    configure_logs(settings.log_level)
    link, *sockets = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    try:
        asyncio.run(_serve(settings, link, sockets))
    finally:
        flush_logs()


if __name__ == "__main__":
    main()
