"""What `GET /metrics` says. Counts are of all workers; dead ones keep theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from openenv_server._admission import AdmissionStatus

__all__ = ["KILLS", "QUEUE_SECONDS", "REFUSED", "REQUESTS", "STARTED", "render"]

_REGISTRY = CollectorRegistry()
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

STARTED = Counter("openenv_sessions_started", "Sessions admitted.", registry=_REGISTRY)
REFUSED = Counter("openenv_refused", "Clients refused.", ["reason"], registry=_REGISTRY)
QUEUE_SECONDS = Histogram(
    "openenv_queue_seconds",
    "Time from the connection to its session.",
    buckets=_SECONDS,
    registry=_REGISTRY,
)
REQUESTS = Histogram(
    "openenv_request_seconds",
    "Time of a reset or step in its environment. `outcome` is ok, error (the environment raised "
    "or refused), or the kind of failure that the observation names.",
    ["request", "outcome"],
    buckets=_SECONDS,
    registry=_REGISTRY,
)
KILLS = Counter(
    "openenv_kills",
    "Running steps that were ended: client_gone, or the limit after which the state was lost.",
    ["reason"],
    registry=_REGISTRY,
)


class _Capacity(Collector):
    def __init__(self, status: AdmissionStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        status = self._status
        values = {
            "openenv_sessions": (status.sessions, "Sessions that hold a slot."),
            "openenv_sessions_limit": (status.limit, "Sessions at a time."),
            "openenv_sessions_free": (status.free, "Sessions that would be admitted at once."),
            "openenv_queue": (status.queue, "Clients that wait for a session."),
            "openenv_draining": (int(status.draining), "1 while no new session is taken."),
        }
        for name, (value, text) in values.items():
            yield GaugeMetricFamily(name, text, value=value)


def render(status: AdmissionStatus) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = _REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # set by the supervisor
        registry = CollectorRegistry()
        collector: Any = multiprocess.MultiProcessCollector
        collector(registry)
    gauges = CollectorRegistry()
    gauges.register(_Capacity(status))
    return generate_latest(gauges) + generate_latest(registry)
