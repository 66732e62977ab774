"""The variables of one session, as the stock interpreter uses them, with limits.

The interpreter (`smolagents.local_python_executor`) keeps variables, printed text and its operation
counter in one dictionary, and copies that for every function call.
"""

from __future__ import annotations

import decimal
import time
from collections.abc import Iterable
from typing import Any

from openenv_server.library import changed_names, parts_of_modules
from openenv_server.modules import Modules
from openenv_server.output import BoundedText

__all__ = ["INTERNAL", "Names", "Printed", "StepTimeoutError"]

_PRINTED = "_print_outputs"
_COUNTER = "_operations_count"

INTERNAL = (_PRINTED, _COUNTER)
"""Names under which the interpreter keeps things of its own."""


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


class _Clock:
    """When the step must end."""

    deadline = float("inf")

    def time_left(self) -> float:
        """Seconds until then."""
        return self.deadline - time.monotonic()


class _Budget(dict[str, int]):
    """The operation counter: read before every operation, so the place to look at the clock."""

    def __init__(self, clock: _Clock, *, counts: bool) -> None:
        super().__init__(counter=0)
        self._clock = clock
        self._counts = counts

    def __getitem__(self, key: str) -> int:
        if time.monotonic() > self._clock.deadline:
            raise StepTimeoutError
        return super().__getitem__(key) if self._counts else 0


class Names(dict[str, Any]):
    """Variables of one session.

    Copies share the printed text and the clock: a function that was defined in an earlier step
    keeps a copy from that step, and prints into this one.

    Args:
        max_output_chars: Limit of the printed text of a step.
        imports: Modules that code may import.
        seed: Of the session's own `random`.
        counts: Leave the interpreter its own limit of operations.

    Attributes:
        modules: What `import` gives; the interpreter asks for it here.
    """

    modules: Modules

    def __init__(
        self, *, max_output_chars: int, imports: Iterable[str], seed: int | None, counts: bool
    ) -> None:
        super().__init__(__name__="__main__")
        self._printed = Printed(max_output_chars)
        self._clock = _Clock()
        self._budget = _Budget(self._clock, counts=counts)
        self._decimal = self._decimal_outside = decimal.Context()
        self.modules = Modules(
            imports,
            parts=parts_of_modules(seed, self._clock.time_left),
            changed=changed_names(),
        )
        self._share(self)

    def _share(self, twin: Names) -> None:
        twin._printed, twin._budget = self._printed, self._budget
        twin.modules = self.modules
        # Where the interpreter looks for them.
        super(Names, twin).__setitem__(_PRINTED, self._printed)
        super(Names, twin).__setitem__(_COUNTER, self._budget)

    def __setitem__(self, name: str, value: Any) -> None:
        # The interpreter sets both anew at the start of a step; ours stay.
        if name not in INTERNAL:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in INTERNAL:
            super().__delitem__(name)

    def copy(self) -> Names:
        """Copy for a function call."""
        twin = Names.__new__(Names)
        super(Names, twin).update(self)
        self._share(twin)
        return twin

    def start_step(self, timeout_s: float) -> None:
        """Empty the printed text, set the clock, and take up the session's decimal context."""
        self._printed.clear()
        self._decimal_outside = decimal.getcontext()  # it is the thread's
        decimal.setcontext(self._decimal)
        self._clock.deadline = time.monotonic() + timeout_s
        self._budget["counter"] = 0

    def end_step(self) -> None:
        """Stop the clock, and put the decimal context of the thread back."""
        self._clock.deadline = float("inf")
        self._decimal = decimal.getcontext()
        decimal.setcontext(self._decimal_outside)

    @property
    def printed(self) -> Printed:
        """What the current step has printed."""
        return self._printed
