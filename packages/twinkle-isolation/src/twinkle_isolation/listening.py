"""The sockets of a service, taken before anything else is started; both services say the same."""

from __future__ import annotations

import errno
import os
import socket

__all__ = ["CannotListenError", "listen", "url_of"]

_BACKLOG = 2048


class CannotListenError(RuntimeError):
    """The address cannot be had; the message is the line for the user."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address that a host name stands for.

    Args:
        host: A name or an address; empty for all addresses of the machine.
        port: 0 takes a free one.

    Returns:
        The listening sockets, one or more, all on the same port. Connections wait in them until the
        server is ready.

    Raises:
        CannotListenError: The name is unknown, the port is in use or needs privileges, or the
            machine has no such address.
    """
    addresses = _resolve(host, port)
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, kind, protocol, _, address in addresses:
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                # With the protocol named, asyncio turns off Nagle's algorithm (40 ms per small
                # answer).
                sock = socket.socket(family, kind, protocol)
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6 and len(addresses) > 1:  # IPv4 has a socket of its own
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address[0], chosen, *address[2:]))
                sock.listen(_BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise CannotListenError(_line(host, chosen, error)) from error
                absent = error  # `localhost` is two addresses, also where IPv6 is turned off
                if error.errno == errno.EADDRNOTAVAIL:
                    sockets.pop().close()
        if not sockets:
            assert absent is not None
            raise CannotListenError(_line(host, port, absent)) from absent
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def url_of(host: str, sockets: list[socket.socket]) -> str:
    """Return the URL of a server on these sockets, without a slash at the end."""
    return f"http://{_shown(host)}:{sockets[0].getsockname()[1]}"


def _resolve(host: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(
            host or None,
            port,
            type=socket.SOCK_STREAM,
            proto=socket.IPPROTO_TCP,
            flags=socket.AI_PASSIVE,
        )
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CannotListenError(
            f"cannot listen on {_shown(host)}:{port}: the host is not known ({why}): give an "
            "address of this machine as --host, such as 127.0.0.1"
        ) from error
    return list(dict.fromkeys(found))


def _line(host: str, port: int, error: OSError) -> str:
    where = f"cannot listen on {_shown(host)}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where}: the port is in use: stop what listens there, or give another --port "
            "(0 takes a free one)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{where}: the port needs privileges: give a --port from 1024 on, or the process "
            "CAP_NET_BIND_SERVICE"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return (
            f"{where}: this machine has no such address: give one of its own as --host, such as "
            "127.0.0.1"
        )
    return f"{where}: {os.strerror(error.errno) if error.errno else error}"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host or "0.0.0.0"
