"""The admission queue of the supervising process, used from a worker over a socket pair.

JSON lines. A worker sends `enter`, `leave` and `status`, each with a number of its own, and `ready`
once; the supervisor answers under that number and sends `stop`. When the connection ends, whatever
the worker held is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from openenv_server._admission import AdmissionQueue, AdmissionStatus, RefusedError, SessionPermit

__all__ = ["RemoteAdmissionQueue", "serve_worker"]

_LOST = AdmissionStatus(sessions=0, limit=0, queue=0, max_queue=0, draining=True)


async def serve_worker(
    queue: AdmissionQueue,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    on_ready: Callable[[], None],
) -> None:
    """Answer one worker until its connection ends."""
    entering: dict[int, asyncio.Task[None]] = {}
    permits: dict[int, SessionPermit] = {}

    def answer(number: int, **fields: Any) -> None:
        if not writer.is_closing():
            writer.write(_line(number=number, **fields))

    async def enter(number: int, client: str, wait_s: float | None) -> None:
        try:
            permits[number] = await queue.enter(client, wait_s=wait_s)
        except RefusedError as error:
            answer(number, refused=error.reason, message=str(error), status=asdict(error.status))
        else:
            answer(number)
        finally:
            del entering[number]

    try:
        while line := await _read_line(reader):
            said = json.loads(line)
            number = said.get("number", 0)
            match said["op"]:
                case "enter":
                    task = asyncio.create_task(enter(number, said["client"], said["wait_s"]))
                    entering[number] = task
                case "leave":
                    if number in entering:
                        entering[number].cancel()
                    if number in permits:
                        permits.pop(number).release()
                case "status":
                    answer(number, status=asdict(queue.now()))
                case _:
                    on_ready()
    finally:
        for task in list(entering.values()):
            task.cancel()
        await asyncio.gather(*entering.values(), return_exceptions=True)
        for permit in permits.values():
            permit.release()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class RemoteAdmissionQueue:
    """The worker's side: an `Admission`.

    Args:
        on_stop: Called once, when the supervisor says so or has ended.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Use the socket the supervisor handed over."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self._reading = asyncio.create_task(self._read(reader, self._writer))

    async def wait_closed(self) -> None:
        """Wait until the supervisor has closed the connection."""
        if self._reading is not None:
            await self._reading

    def ready(self) -> None:
        """Tell the supervisor that this worker serves."""
        self._send(op="ready")

    async def enter(self, client: str, *, wait_s: float | None = None) -> SessionPermit:
        """Wait for a slot; see `AdmissionQueue.enter`."""
        number = next(self._numbers)
        try:
            said = await self._ask(number, op="enter", client=client, wait_s=wait_s)
        except asyncio.CancelledError:
            self._send(op="leave", number=number)
            raise
        if "refused" in said:
            error = RefusedError(said["refused"], AdmissionStatus(**said["status"]))
            error.args = (said["message"],)
            raise error
        return SessionPermit(lambda: self._send(op="leave", number=number))

    async def status(self) -> AdmissionStatus:
        """Return the numbers of the whole server."""
        said = await self._ask(next(self._numbers), op="status")
        return AdmissionStatus(**said["status"])

    async def _ask(self, number: int, **fields: Any) -> dict[str, Any]:
        if self._reading is None or self._reading.done():
            return {"refused": "lost", "message": _lost_text(), "status": asdict(_LOST)}
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            self._send(number=number, **fields)
            return await future
        finally:
            del self._answers[number]

    def _send(self, **fields: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_line(**fields))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await _read_line(reader):
                said = json.loads(line)
                if "number" not in said:  # `stop`
                    break
                future = self._answers.get(said["number"])
                if future is not None and not future.done():
                    future.set_result(said)
            else:  # the supervisor has ended, and with it the limits it kept
                lost = {"refused": "lost", "message": _lost_text(), "status": asdict(_LOST)}
                for future in self._answers.values():
                    if not future.done():
                        future.set_result(lost)
        finally:
            self._on_stop()
        # Permits are still given back while the sessions end.
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


def _lost_text() -> str:
    return str(RefusedError("lost", _LOST))


def _line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ConnectionError:
        return b""
