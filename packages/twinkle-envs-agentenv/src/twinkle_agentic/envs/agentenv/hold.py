"""What an env holds, apart from the env: so that it can be let go of when the env is garbage."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from twinkle_agentic.envs.agentenv.waiting import interruptible

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv.lease import Lease

logger = logging.getLogger(__name__)

__all__ = ["Hold"]


class Hold:
    """The sandbox an env holds; it outlives the env, so that it can be let go of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticket = 0
        self.lease: Lease | None = None

    def take(self, lease: Lease, ticket: int) -> bool:
        """Hold a sandbox, unless something was released since the ticket was given."""
        with self._lock:
            if ticket != self._ticket:
                return False
            self.lease = lease
            return True

    def release(self) -> int:
        """Kill what is held and return a ticket for the next `take`."""
        with self._lock:
            self._ticket += 1
            ticket = self._ticket
            lease, self.lease = self.lease, None
        if lease is not None:
            interruptible(lease.kill)
        return ticket

    def abandon(self) -> None:
        """Let go of what a garbage env held, without making the collector wait."""
        lease = self.lease
        if lease is not None and not lease.killed:
            logger.warning("an AgentEnv was dropped without close(): killing its sandbox")
            # A RuntimeError: the interpreter exits and starts no thread; its hook kills them all.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.release, daemon=True).start()
