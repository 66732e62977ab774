"""What a run does when episodes fail: wait for a server, play again, or stop."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_agentic.rollout.cli.probes import Probe

__all__ = ["SameFailures", "Servers", "StoppedError", "defect_of"]

_POLL_S = 1.0
# Of an env's own code: no action of a model raises one of these.
_DEFECTS = re.compile(
    r"Error: (NameError|UnboundLocalError|AttributeError|ImportError|ModuleNotFoundError"
    r"|NotImplementedError|SyntaxError)\b"
)


class StoppedError(Exception):
    """The run makes no sense any more; the message says why and what to do."""


class Servers:
    """The servers of a run, which may go away for a while.

    Args:
        probes: For each kind of server: one probe for each that could serve; one is enough.
        wait_s: How long to wait for one; 0 to not wait.
    """

    def __init__(self, probes: Sequence[Sequence[Callable[[], Probe]]], wait_s: float) -> None:
        self._probes = probes
        self._wait_s = wait_s

    def wait(self) -> bool:
        """Wait until all kinds of servers serve; returns whether one did not at first.

        Raises:
            StoppedError: It did not come back in time.
        """
        if not self._wait_s:
            return False
        deadline = time.monotonic() + self._wait_s
        away = self._away()
        if away is None:
            return False
        text = f"the {away.name} at {away.url} does not answer ({away.detail})"
        sys.stderr.write(f"waiting: {text}, for at most {self._wait_s:g} s\n")
        while (away := self._away()) is not None:
            if time.monotonic() >= deadline:
                raise StoppedError(
                    f"{text} and did not come back within --wait-for-server-s {self._wait_s:g}"
                )
            time.sleep(_POLL_S)
        sys.stderr.write("waiting: the server is back\n")
        return True

    def _away(self) -> Probe | None:
        for kind in self._probes:
            found: list[Probe] = []
            for probe in kind:
                found.append(probe())
                if found[-1].ok:
                    break
            else:
                if found:
                    return found[0]
        return None


class SameFailures:
    """Counts equal failures that no retry mends, one after the other.

    Args:
        limit: How many end the run; 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._text, self._count = "", 0

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Count a trajectory that has ended.

        Raises:
            StoppedError: It is the last that is allowed.
        """
        text = defect_of(trajectory)
        if text is None and trajectory.get("reward") is None:
            if trajectory.get("retryable"):
                return  # says nothing about the others
            text = str(trajectory.get("error"))
        if text is None:
            self._count = 0
            return
        self._count = self._count + 1 if text == self._text else 1
        self._text = text
        if self._limit and self._count >= self._limit:
            raise StoppedError(
                f"{self._count} episodes in a row failed alike, and no retry mends that: {text}. "
                "Mend it first (--max-same-failures 0 plays on)"
            )


def defect_of(trajectory: Mapping[str, Any]) -> str | None:
    """Return the error of an env whose own code failed in every step; `None` for any other.

    The episode has a reward, since each failed step counts 0, but that says nothing of the model.
    """
    steps = trajectory.get("step_rewards") or ()
    if not steps or len(trajectory.get("failed_steps") or ()) < len(steps):
        return None
    texts = {
        str(message.get("content"))
        for message in trajectory.get("messages") or ()
        if message.get("role") == "tool"
    }
    text = texts.pop() if len(texts) == 1 else ""
    return text if _DEFECTS.match(text) else None
