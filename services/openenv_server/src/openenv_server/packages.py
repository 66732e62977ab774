"""The Python packages that sessions may import: a directory with those and nothing else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["MissingPackageError", "find_package", "stage_packages"]


class MissingPackageError(ValueError):
    """A package that sessions are to import is not installed beside the server."""


def find_package(name: str) -> Distribution:
    """Return an installed distribution.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise MissingPackageError(
            f"package {name!r} is not installed beside the server: "
            f"run `pip install {name}`, or take it out of --packages"
        ) from None


def stage_packages(names: Iterable[str], directory: Path) -> None:
    """Link (or copy) installed distributions, and what they require, into a directory.

    Raises:
        MissingPackageError: One of `names` is not installed.
    """
    for found in _with_requirements(names).values():
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if ".." in file.parts or file.suffix == ".pyc" or not source.is_file():
                continue  # scripts outside of the library, caches
            target = directory / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                _place(source, target)
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o755)  # sessions are another user


def _place(source: Path, target: Path) -> None:
    if source.stat().st_mode & 0o004:
        try:
            os.link(source, target)
        except OSError:  # another file system
            pass
        else:
            return
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _with_requirements(names: Iterable[str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    todo = [(name, frozenset[str]()) for name in names]
    while todo:
        name, extras = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found and not extras:
            continue
        found[key] = find_package(name)
        for text in found[key].requires or ():
            requirement = Requirement(text)
            if _wanted(requirement, extras):
                todo.append((requirement.name, frozenset(requirement.extras)))
    return found


def _wanted(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
