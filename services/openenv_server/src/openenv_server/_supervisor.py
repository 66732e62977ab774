"""The main process of `twinkle-openenv-server`: it decides who is let in, and keeps the workers.

It serves no connection and runs no code, so nothing a session does can keep it from ending: after
SIGTERM, the drain and 5 seconds, whatever worker is left is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from dataclasses import dataclass, field

from openenv_server._admission import AdmissionQueue
from openenv_server._admission_link import serve_worker
from openenv_server._logs import configure_logs, flush_logs
from openenv_server.settings import Settings, variable_of
from twinkle_isolation.listening import url_of

__all__ = ["STOP_LIMIT_S", "Supervisor"]

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 5.0
"""Seconds from the end of the drain to the end of the server."""

_NOT_STARTED = 3
_RESTART_DELAY_S = 1.0


@dataclass(eq=False)
class _Worker:
    process: Process
    link: asyncio.StreamWriter
    serving: asyncio.Task[None]
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs the workers on listening sockets until a signal says to end."""

    def __init__(self, settings: Settings, sockets: list[socket.socket]) -> None:
        self._settings = settings
        self._sockets = sockets
        self._queue = AdmissionQueue(
            limit=settings.max_concurrent_envs,
            max_queue=settings.max_queue,
            queue_timeout_s=settings.queue_timeout_s,
        )
        self._workers: set[_Worker] = set()
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._ready = 0
        self._code = 0

    async def run(self) -> int:
        """Serve; returns the exit code: 0, or 3 when a worker could not start."""
        configure_logs(self._settings.log_level)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        url = url_of(self._settings.host, self._sockets)
        logger.info("Uvicorn running on %s (Press CTRL+C to quit)", url)
        with tempfile.TemporaryDirectory(prefix="openenv-server-") as metrics_folder:
            keepers = [
                asyncio.create_task(self._keep(metrics_folder))
                for _ in range(self._settings.workers)
            ]
            try:
                await self._stop.wait()
            finally:
                self._queue.drain()
                for sock in self._sockets:
                    sock.close()
                await self._end_workers()
                for keeper in keepers:
                    keeper.cancel()
                await asyncio.gather(*keepers, return_exceptions=True)
        logger.info("Stopped")
        flush_logs()
        return self._code

    def _drain(self) -> None:
        if self._draining is not None:  # a second SIGTERM does not wait
            self._stop.set()
            return
        limit_s = self._settings.drain_timeout_s
        self._queue.drain()
        sessions = self._queue.now().sessions
        logger.info("SIGTERM: %d sessions get %g s to end", sessions, limit_s)

        async def wait() -> None:
            try:
                async with asyncio.timeout(limit_s):
                    await self._queue.wait_empty()
            except TimeoutError:
                logger.warning("%d sessions are cut off", self._queue.now().sessions)
            self._stop.set()

        self._draining = asyncio.create_task(wait())

    async def _keep(self, metrics_folder: str) -> None:
        """Keep one worker running."""
        while not self._stop.is_set():
            worker = await self._start(metrics_folder)
            code = await worker.process.wait()
            await worker.serving
            self._workers.discard(worker)
            if self._stop.is_set():
                return
            if self._ready < self._settings.workers and not worker.ready.is_set():
                logger.error("a worker ended with %d before it served", code)
                self._code = _NOT_STARTED
                self._stop.set()
                return
            logger.error(
                "worker %d ended with %d: its sessions are lost, another is started",
                worker.process.pid,
                code,
            )
            await asyncio.sleep(_RESTART_DELAY_S)

    async def _start(self, metrics_folder: str) -> _Worker:
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno(), *(sock.fileno() for sock in self._sockets)]
        secret = variable_of("token")
        environ = {k: v for k, v in os.environ.items() if k.upper() != secret}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "openenv_server._worker", *map(str, passed)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=passed,
                env={**environ, "PROMETHEUS_MULTIPROC_DIR": metrics_folder},
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        assert process.stdin is not None
        process.stdin.write(self._settings.model_dump_json().encode())
        process.stdin.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        ready = asyncio.Event()

        def on_ready() -> None:
            ready.set()
            self._ready += 1
            if self._ready == self._settings.workers:
                logger.info("Application startup complete.")

        serving = asyncio.create_task(serve_worker(self._queue, reader, writer, on_ready))
        worker = _Worker(process, writer, serving, ready)
        self._workers.add(worker)
        return worker

    async def _end_workers(self) -> None:
        workers = [worker for worker in self._workers if worker.process.returncode is None]
        for worker in workers:
            worker.link.write(b'{"op": "stop"}\n')
        waits = [asyncio.create_task(worker.process.wait()) for worker in workers]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=STOP_LIMIT_S)
        if not late:
            return
        logger.warning("%d workers are killed: they did not end in %g s", len(late), STOP_LIMIT_S)
        for worker in workers:
            if worker.process.returncode is None:
                worker.process.kill()
        await asyncio.wait(late)
