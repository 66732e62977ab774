"""Files of a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.envs.agentenv.lease import Lease
from twinkle_agentic.envs.agentenv.recovery import Recovery
from twinkle_agentic.envs.agentenv.waiting import in_flight

__all__ = ["MAX_FILE_BYTES", "read_bytes", "write_bytes"]

T = TypeVar("T")

MAX_FILE_BYTES = 64 * 2**20
"""The longest file that is read into the memory of the trainer."""


def write_bytes(lease: Lease, path: str, data: bytes) -> None:
    """Write a file, its directories too; an existing one is overwritten.

    Raises:
        ToolFaultError: The path cannot be written, the disk is full.
        SandboxLostError: The sandbox is gone.
        EnvTimeoutError: No answer within `request_timeout`.
        SandboxError: It failed for another reason.
    """

    def write() -> None:
        lease.sandbox.files.write(_checked(path), data)  # pyright: ignore[reportUnknownMemberType]

    _repeated(lease, f"writing {path[:200]!r}", write)


def read_bytes(lease: Lease, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a file.

    Raises:
        ToolFaultError: There is no such file, it cannot be read, or it is longer than `max_bytes`.
        SandboxLostError: The sandbox is gone.
        EnvTimeoutError: No answer within `request_timeout`.
        SandboxError: It failed for another reason.
    """
    return _repeated(
        lease, f"reading {path[:200]!r}", lambda: _read(lease, _checked(path), max_bytes)
    )


def _repeated(lease: Lease, doing: str, call: Callable[[], T]) -> T:
    """Return what a call gives that does no harm when it is made twice."""
    recovery = Recovery(lease, doing, repeatable=True)
    while True:
        try:
            with in_flight():
                value = call()
        except ToolFaultError:
            raise
        except Exception as error:
            recovery.again(error)
        else:
            lease.fresh = False
            return value


def _read(lease: Lease, path: str, max_bytes: int) -> bytes:
    found = bytearray()
    # As a stream, for a file that does not fit is not to be held first.
    with lease.sandbox.files.read(
        path, format="stream", request_timeout=lease.spec.connection.request_timeout
    ) as chunks:
        for chunk in chunks:
            found += chunk
            if len(found) > max_bytes:
                raise ToolFaultError(
                    f"{path!r} is longer than {max_bytes} bytes: read a part of it with a command"
                )
    return bytes(found)


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise ToolFaultError(f"{path!r} is no path")
    return path
