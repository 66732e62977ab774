"""The host's side of the zygote: its process, and the requests that make it fork."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_isolation.errors import SandboxStartError

logger = logging.getLogger(__name__)
__all__ = ["CommandFor", "ZygoteLink"]

_START_TIMEOUT_S = 60.0  # with what it imports beforehand
_END_TIMEOUT_S = 10.0
# The kernel takes sandboxes before other processes when memory ends. With CAP_SYS_RESOURCE, it also
# keeps their programs from lowering their score below this.
_LEAST_BADNESS = 500
_RAISE_BADNESS = (
    "read own </proc/self/oom_score_adj && "
    f"[ $own -ge {_LEAST_BADNESS} ] || echo {_LEAST_BADNESS} >/proc/self/oom_score_adj\n"
    'exec "$@"'
)

CommandFor = Callable[[int], Sequence[str]]


class ZygoteLink:
    """One running zygote. Belongs to the event loop it was started in."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.process = process
        self._control: socket.socket | None = control
        self._waiting: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._next = 1
        self._lock = asyncio.Lock()
        asyncio.get_running_loop().add_reader(control.fileno(), self._on_answer)

    @classmethod
    async def start(cls, command: CommandFor, config: Mapping[str, Any]) -> ZygoteLink:
        """Start a zygote and wait until it can fork.

        Args:
            command: Makes the command line from the number of the inherited socket.
            config: Its first message.

        Raises:
            SandboxStartError: It did not start; the message is what it printed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as errors:
            try:
                # Not asyncio's way, for the parent has to be this thread: when that ends, the
                # kernel ends the jail. It takes a few milliseconds, once.
                process = subprocess.Popen(  # noqa: ASYNC220
                    ["/bin/sh", "-c", _RAISE_BADNESS, "sh", *command(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=[theirs.fileno()],
                    env={},
                    cwd="/",
                )
            except OSError as error:
                ours.close()
                raise SandboxStartError(f"cannot start /bin/sh: {error}") from error
            finally:
                theirs.close()
            ours.setblocking(False)
            answer = b""
            try:
                ours.send(json.dumps(config).encode())
                receive = asyncio.get_running_loop().sock_recv(ours, 4096)
                answer = await asyncio.wait_for(receive, _START_TIMEOUT_S)
            except (OSError, TimeoutError) as error:
                logger.debug("the zygote did not answer: %r", error)
            if answer:
                return cls(process, ours)
            ours.close()
            process.kill()
            await asyncio.to_thread(process.wait)
            errors.seek(0)
            text = errors.read()[-2000:].decode(errors="replace").strip()
            raise SandboxStartError(text or f"the zygote ended with {process.returncode}")

    @property
    def alive(self) -> bool:
        """The zygote can be asked."""
        return self._control is not None

    async def fork(self, sandbox: Mapping[str, Any], fds: Sequence[int]) -> tuple[int, int]:
        """Make a sandbox's supervisor.

        Args:
            sandbox: What the guest wants to know.
            fds: The supervisor's socket, the archive if there is one, the groups to join.

        Returns:
            Its process id as the zygote sees it, and a pidfd that the caller owns.

        Raises:
            SandboxStartError: It could not be made, or the zygote has ended.
            OSError: This process has no descriptor left (`EMFILE`).
        """
        number = self._next
        self._next += 1
        future: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._send(json.dumps({"id": number, "sandbox": sandbox}).encode(), fds)
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                os.close(future.result()[1])
            raise
        finally:
            del self._waiting[number]

    async def close(self, reason: str) -> None:
        """Hang up, and wait for the zygote's end with all that it started."""
        self._drop(reason)
        try:
            await asyncio.to_thread(self.process.wait, _END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)

    def _drop(self, reason: str) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxStartError(f"the zygote has ended: {reason}"))

    def _on_answer(self) -> None:
        assert self._control is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 65536, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(str(error))
            return
        if not data:
            self._drop("its connection closed")
            logger.error("the zygote has ended")
            return
        answer = json.loads(data)
        future = self._waiting.get(answer["id"])
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        elif answer["error"]:
            future.set_exception(SandboxStartError(f"the sandbox did not start: {answer['error']}"))
        elif not fds:  # the kernel drops a descriptor that this process has no room for
            future.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        else:
            future.set_result((answer["pid"], fds[0]))

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        async with self._lock:
            while True:
                if self._control is None:
                    raise SandboxStartError("the zygote has ended")
                try:
                    socket.send_fds(self._control, [data], list(fds))
                except BlockingIOError:
                    await _writable(self._control)
                except OSError as error:
                    raise SandboxStartError(f"the zygote cannot be reached: {error}") from error
                else:
                    return


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_writer(sock.fileno())
