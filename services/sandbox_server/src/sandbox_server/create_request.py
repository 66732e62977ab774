"""What a client may ask of a new sandbox."""

from __future__ import annotations

from typing import Any

from sandbox_server.config import ServerConfig
from sandbox_server.errors import ApiError
from sandbox_server.values import as_environment, as_list, as_object, as_text, as_texts

__all__ = ["CreateRequest", "checked_timeout"]

_MAX_METADATA = 64 << 10
_REFUSED = ("iam", "mcp", "volumeMounts")


class CreateRequest:
    """A create request, checked.

    Raises:
        ApiError: Something in it is not possible (400).
    """

    def __init__(
        self,
        message: dict[str, Any],
        config: ServerConfig,
        default_timeout_s: float,
        *,
        isolation: str,
    ) -> None:
        self.template = as_text(message.get("templateID") or "base", "templateID")
        self.timeout_s = checked_timeout(message.get("timeout", default_timeout_s), config)
        self.metadata = as_texts(message.get("metadata"), "metadata", _MAX_METADATA)
        self.env = as_environment(message.get("envVars"), "envVars")
        self.auto_pause = bool(message.get("autoPause", False))
        self.auto_resume = bool(as_object(message.get("autoResume"), "autoResume").get("enabled"))
        internet = message.get("allow_internet_access", message.get("allowInternetAccess"))
        self.network = config.network if internet is None else bool(internet)
        if self.network and not config.network:
            raise ApiError(
                400, "allow_internet_access=true: this server was started without --network"
            )
        if internet is not None and not self.network and isolation == "process":
            raise ApiError(
                400, "allow_internet_access=false: without isolation it cannot be taken away"
            )
        _check_rules(as_object(message.get("network"), "network"), network=self.network)
        for name in _REFUSED:
            if message.get(name):
                raise ApiError(400, f"{name} is not supported by this server")


def _check_rules(rules: dict[str, Any], *, network: bool) -> None:
    """Refuse rules that would not be kept; without a network, all that deny are."""
    allowed = as_list(rules.get("allowOut"), "network.allowOut")
    denied = as_list(rules.get("denyOut"), "network.denyOut")
    if allowed or rules.get("rules") or (denied and network):
        raise ApiError(400, "network rules are not supported by this server: it has all or nothing")


def checked_timeout(value: object, config: ServerConfig) -> float:
    """Return a lifetime in seconds.

    Raises:
        ApiError: It is not a number in range (400).
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= config.max_timeout_s
    ):
        raise ApiError(
            400, f"timeout={value!r} is not a number of seconds in 0..{config.max_timeout_s:g}"
        )
    return float(value)
