"""Files of a sandbox."""

from __future__ import annotations

from twinkle_agentic.envs.agentenv._handle import SandboxHandle
from twinkle_agentic.envs.agentenv._retry import repeated
from twinkle_agentic.envs.agentenv.errors import ToolFaultError

_MAX_FILE_BYTES = 64 * 2**20  # the longest file that is read into the memory of the trainer


def write_bytes(handle: SandboxHandle, path: str, data: bytes) -> None:
    """Write a file, its directories too; an existing one is overwritten. Raises as `repeated`."""

    def write() -> None:
        handle.sandbox.files.write(path, data)  # pyright: ignore[reportUnknownMemberType]

    _check_path(path)
    repeated(handle, f"writing {path[:200]!r}", write)


def read_bytes(handle: SandboxHandle, path: str, *, max_bytes: int = _MAX_FILE_BYTES) -> bytes:
    """Read a file. Raises as `repeated`, and `ToolFaultError` where it is too long."""

    def read() -> bytes:
        found = bytearray()
        # As a stream, so that a file which is too long is not held in memory first.
        with handle.sandbox.files.read(
            path, format="stream", request_timeout=handle.spec.connection.request_timeout
        ) as chunks:
            for chunk in chunks:
                found += chunk
                if len(found) > max_bytes:
                    raise ToolFaultError(
                        f"{path!r} is longer than {max_bytes} bytes: read a part of it with a "
                        "command"
                    )
        return bytes(found)

    _check_path(path)
    return repeated(handle, f"reading {path[:200]!r}", read)


def _check_path(path: str) -> None:
    if not path or "\0" in path:
        raise ToolFaultError(f"{path!r} is no path")
