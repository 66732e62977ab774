"""The variables of one session, as the stock interpreter uses them, with limits.

The interpreter (`smolagents.local_python_executor`) keeps variables, printed text and its operation
counter in one dictionary, and copies that for every function call.
"""

from __future__ import annotations

import time
from typing import Any

from openenv_server.output import BoundedText

__all__ = ["Names", "Printed", "StepTimeoutError"]

_PRINTED = "_print_outputs"
_COUNTER = "_operations_count"


class StepTimeoutError(BaseException):
    """The step ran out of time. No `except` in the code catches it."""


class Printed:
    """Printed text of the current step, in the place of the interpreter's own container."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._text = BoundedText(limit)

    def clear(self) -> None:
        """Start empty again."""
        self._text = BoundedText(self._limit)

    def __iadd__(self, text: object) -> Printed:
        self._text.add(str(text))
        return self

    def __str__(self) -> str:
        return self._text.text()

    def __len__(self) -> int:
        return len(str(self))

    @property
    def value(self) -> str:
        """The text; the interpreter assigns its own truncation of it, which is dropped."""
        return str(self)

    @value.setter
    def value(self, _: str) -> None:
        return None


class _Budget(dict[str, int]):
    """The operation counter: read before every operation, so the place to look at the clock."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__(counter=0)
        self.deadline = float("inf")
        self._counts = counts

    def __getitem__(self, key: str) -> int:
        if time.monotonic() > self.deadline:
            raise StepTimeoutError
        return super().__getitem__(key) if self._counts else 0


class Names(dict[str, Any]):
    """Variables of one session.

    Copies share the printed text and the clock: a function that was defined in an earlier step
    keeps a copy from that step, and prints into this one.

    Args:
        max_output_chars: Limit of the printed text of a step.
        counts: Leave the interpreter its own limit of operations.
    """

    def __init__(self, *, max_output_chars: int, counts: bool) -> None:
        super().__init__(__name__="__main__")
        self._printed = Printed(max_output_chars)
        self._budget = _Budget(counts=counts)
        self._share(self)

    def _share(self, twin: Names) -> None:
        twin._printed, twin._budget = self._printed, self._budget
        # Where the interpreter looks for them.
        super(Names, twin).__setitem__(_PRINTED, self._printed)
        super(Names, twin).__setitem__(_COUNTER, self._budget)

    def __setitem__(self, name: str, value: Any) -> None:
        # The interpreter sets both anew at the start of a step; ours stay.
        if name not in (_PRINTED, _COUNTER):
            super().__setitem__(name, value)

    def copy(self) -> Names:
        """Copy for a function call."""
        twin = Names.__new__(Names)
        super(Names, twin).update(self)
        self._share(twin)
        return twin

    def start_step(self, timeout_s: float) -> None:
        """Empty the printed text and set the clock."""
        self._printed.clear()
        self._budget.deadline = time.monotonic() + timeout_s
        self._budget["counter"] = 0

    def end_step(self) -> None:
        """Stop the clock."""
        self._budget.deadline = float("inf")

    def time_left(self) -> float:
        """Seconds the step may still take."""
        return self._budget.deadline - time.monotonic()

    @property
    def printed(self) -> Printed:
        """What the current step has printed."""
        return self._printed
