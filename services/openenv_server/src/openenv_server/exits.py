"""How code ends itself, and raises what the interpreter would mistake."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["CarriedError", "end_program"]


class CarriedError(Exception):
    """Carries an exception past the interpreter, whose `try` is for `Exception` alone."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(original)
        self.original = original


def end_program(code: object = None) -> NoReturn:
    """End the code, as `exit` and `sys.exit` do."""
    raise CarriedError(SystemExit(code))
