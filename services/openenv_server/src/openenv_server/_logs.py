"""Where the logs of the server and its workers go: standard error, one line per event."""

from __future__ import annotations

import logging
import logging.config

__all__ = ["configure_logs"]


def configure_logs(level: str) -> None:
    """Write the logs of this process to standard error."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "line": {"format": "%(asctime)s %(levelname)s [%(process)d] %(message)s"}
            },
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            # A line for each connection: the sessions say that already.
            "loggers": {"uvicorn": {"level": "WARNING"}, "asyncio": {"level": "WARNING"}},
        }
    )
