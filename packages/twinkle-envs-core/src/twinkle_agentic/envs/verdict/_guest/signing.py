"""The signature of a verdict, by which the grader tells it from what a solution prints."""

from __future__ import annotations

import hashlib

__all__ = ["sign"]

_BLAKE = hashlib.blake2b


def sign(body: bytes) -> str:
    """Sign a verdict.

    `CompiledTests.program` puts the key of the run in place of the constant.
    """
    return _BLAKE(body, key=b"__VERDICT_KEY__", digest_size=32).hexdigest()
