"""Reading values whose shape nobody vouches for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

__all__ = ["fields_of", "items_of"]


def fields_of(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty one for anything else."""
    if type(value) is dict:  # nearly always; asking the abstract class costs ten times as much
        return cast("dict[str, Any]", value)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def items_of(value: object) -> list[Any]:
    """Return a list or tuple as a new list, and an empty one for anything else."""
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else []
