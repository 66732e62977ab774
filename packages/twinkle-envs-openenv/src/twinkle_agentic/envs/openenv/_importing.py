"""Importing environment packages, also those that import their own modules by bare names.

Many write `from models import X` in place of `from snake_env.models import X`, which works where
the package's folder is the working directory. Here such a name is answered with the package's own
module, for the time of the import alone, so that two environments in one process keep their
`models` apart.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["import_module", "is_importable", "load_object"]

logger = logging.getLogger(__name__)

_MAX_BARE_NAMES = 12
_lock = threading.RLock()


def is_importable(name: str) -> bool:
    """Whether a top-level module is installed; nothing is imported."""
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def import_module(name: str) -> ModuleType:
    """Import a module of an environment package.

    Raises:
        ImportError: As Python raises it, for a module that is missing or that fails.
    """
    package = name.partition(".")[0]
    with _lock:
        aliases: dict[str, ModuleType] = {}
        try:
            for _ in range(_MAX_BARE_NAMES):
                try:
                    return importlib.import_module(name)
                except ModuleNotFoundError as error:
                    bare = (error.name or "").partition(".")[0]
                    own = _own_module(package, bare)
                    if own is None or bare in aliases:
                        raise
                    logger.debug("%s imports %r as %r", name, own, bare)
                    aliases[bare] = sys.modules[bare] = importlib.import_module(own)
            return importlib.import_module(name)
        finally:
            for bare in aliases:
                for loaded in [m for m in sys.modules if m == bare or m.startswith(f"{bare}.")]:
                    del sys.modules[loaded]


def load_object(path: str | Any, *, argument: str) -> Any:
    """Return what `module:Name` (or `module.Name`) names; what is no string is returned as it is.

    Args:
        path: The name, or the class.
        argument: Which argument it came from, for the messages.

    Raises:
        ValueError: It has neither form.
        ImportError: There is no such module, or no such name in it.
    """
    if not isinstance(path, str):
        return path
    module, separator, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not separator or not module or not name:
        raise ValueError(f"{argument} must be 'module:Name' or a class, found {path!r}")
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ModuleNotFoundError(
                f"{argument}={path!r} names the module {module!r}, which is not installed here: "
                "install the package that has it, or put it on PYTHONPATH",
                name=error.name,
            ) from error
        raise
    target: Any = loaded
    for part in name.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise ImportError(
                f"{argument}={path!r}: module {module!r} has no {name!r}", name=module
            ) from None
    return target


def _own_module(package: str, bare: str) -> str | None:
    """Find what a bare name means inside a package: its own module or one of its server's."""
    if not bare or bare == package:
        return None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for where, prefix in ((Path(root), package), (Path(root, "server"), f"{package}.server")):
            if (where / f"{bare}.py").is_file() or os.path.isdir(where / bare):
                return f"{prefix}.{bare}"
    return None
