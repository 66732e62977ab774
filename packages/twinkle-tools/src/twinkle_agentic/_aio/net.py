"""Which host names mean this machine."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(host: str | None) -> bool:
    """Tell whether a host is this machine, so that no proxy has to be asked; looks nothing up.

    Args:
        host: As `urllib.parse.urlsplit(url).hostname` gives it, without the brackets of IPv6.
    """
    if not host:
        return False
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
