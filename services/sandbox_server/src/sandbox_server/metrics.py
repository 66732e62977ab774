"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sandbox_server_{name}", text, registry=self.registry)

        self.created = counter("sandboxes_created", "Sandboxes made.")
        self.killed = counter(
            "sandboxes_killed", "Sandboxes killed, on request or at the end of their lease."
        )
        self.expired = counter("sandboxes_expired", "Leases that ended (killed or paused).")
        self.lost = counter("sandboxes_lost", "Sandboxes that ended by themselves.")
        self.refused = counter("sandboxes_refused", "Creates refused because the server is full.")
        self.failed = counter("sandboxes_failed", "Creates that failed.")
        self.requests = Counter(
            "sandbox_server_requests", "Requests.", ["plane"], registry=self.registry
        )
        self.create_seconds = Histogram(
            "sandbox_server_create_seconds",
            "Time of a create.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._sandboxes = Gauge(
            "sandbox_server_sandboxes", "Sandboxes now.", ["state"], registry=self.registry
        )

    def watch(self, count: Callable[[str], int]) -> None:
        """Take the number of sandboxes in a state from `count` at every scrape."""
        for state in ("running", "paused"):
            self._sandboxes.labels(state).set_function(lambda s=state: count(s))

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)
