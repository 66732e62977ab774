"""The place of an env's sandbox, apart from the env: it can be emptied when the env is garbage."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv._handle import SandboxHandle

logger = logging.getLogger(__name__)


class SandboxSlot:
    """Holds the sandbox of an env, or none.

    Args:
        owner: The env; when it is garbage collected, the sandbox is killed.
        handle: The sandbox at first.
    """

    def __init__(self, owner: object, handle: SandboxHandle | None = None) -> None:
        self.handle = handle
        self._lock = threading.Lock()
        self._generation = 0
        weakref.finalize(owner, self._abandon).atexit = False

    def fill(self, handle: SandboxHandle, generation: int) -> bool:
        """Hold a sandbox, unless `empty` was called again since it returned `generation`."""
        with self._lock:
            if generation == self._generation:
                self.handle = handle
            return generation == self._generation

    def empty(self) -> int:
        """Kill the sandbox that is held and return a generation for the next `fill`."""
        with self._lock:
            self._generation += 1
            generation = self._generation
            handle, self.handle = self.handle, None
        if handle is not None:
            handle.kill()
        return generation

    def _abandon(self) -> None:
        if self.handle is not None:
            logger.warning("an AgentEnv was dropped without close(): killing its sandbox")
            # In a thread, so that garbage collection does not wait. RuntimeError: the interpreter
            # exits and starts no thread; its exit hook kills all sandboxes.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.empty, daemon=True).start()
