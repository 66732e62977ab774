"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path, *, sync: bool = False, errors: str = "strict") -> Generator[IO[str]]:
    """Open a text file (UTF-8) that takes the place of `path` at the end of the block.

    Args:
        path: An existing file there is kept where the block raises; then nothing else is left.
        sync: Bring the content to the disk first, so that the name never stands for an empty file,
            even after a power cut.
        errors: What becomes of characters that UTF-8 does not have, as for `open`.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("w", encoding="utf-8", errors=errors) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
