"""Finding the classes of an environment package by what they are, not what they are called."""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from twinkle_agentic.envs.openenv._importing import import_module

__all__ = [
    "ClientClasses",
    "EnvironmentClasses",
    "action_class_of_environment",
    "class_made_by",
    "classes_of_client",
    "find_client_class",
    "find_environment_classes",
    "is_network_client",
    "missing_arguments",
]

_NETWORK_CLIENTS = ("EnvClient", "OpenEnvClient", "AgentEnv")
# Importing these starts a server application.
_ENTRY_POINTS = ("app", "main", "__main__")


@dataclass(frozen=True, slots=True)
class EnvironmentClasses:
    """The server side of a package; `action_cls` is `None` where the package does not say."""

    env_cls: type
    action_cls: Any | None


@dataclass(frozen=True, slots=True)
class ClientClasses:
    """The client side of a package; the others are `None` where the client does not say."""

    client_cls: type
    action_cls: Any | None = None
    observation_cls: Any | None = None


@dataclass(slots=True)
class _Scan:
    found: list[type] = field(default_factory=list[type])
    imported: list[str] = field(default_factory=list[str])
    failed: dict[str, Exception] = field(default_factory=dict[str, Exception])

    def visit(self, module: str, base: type) -> None:
        try:
            loaded = import_module(module)
        except Exception as error:  # other people's import-time code
            self.failed[module] = error
            return
        self.imported.append(module)
        self.found += [cls for cls in _classes_of(loaded, base) if cls not in self.found]


def find_environment_classes(env_name: str) -> EnvironmentClasses:
    """Find the Environment and Action classes of a package.

    The Environment is the concrete subclass of OpenEnv's `Environment` that is defined in
    `<env_name>.server`; of several, the one that `server/app.py` serves.

    Raises:
        ModuleNotFoundError: The package (or `openenv`) is not installed.
        ImportError: It has no such class, or several; the message names what was seen.
    """
    base = _openenv_class("openenv.core.env_server.interfaces", "Environment")
    _import_package(env_name)
    server = f"{env_name}.server"
    scan = _Scan()
    server_path = _path_of_server(env_name)
    likely, rest = _server_modules(server_path, server)
    for module in likely:
        scan.visit(module, base)
    if not scan.found:
        for module in rest:
            scan.visit(module, base)
    own = [cls for cls in scan.found if cls.__module__.startswith(f"{env_name}.")]
    concrete = [cls for cls in own if not inspect.isabstract(cls)]
    chosen = concrete if len(concrete) <= 1 else _served(server_path, concrete)
    if len(chosen) > 1:  # the base of another, such as a generic wrapper, is not what is meant
        chosen = [c for c in chosen if not any(c is not o and issubclass(o, c) for o in chosen)]
    if len(chosen) != 1:
        raise ImportError(_what_was_seen(server, "Environment", concrete, scan), name=server)
    return EnvironmentClasses(
        chosen[0],
        action_class_of_environment(chosen[0]) or _client_action(env_name),
    )


def find_client_class(env_name: str) -> type:
    """Find the EnvClient class of a package, in the package itself or in its `client` module.

    Raises:
        ModuleNotFoundError: The package (or `openenv`) is not installed.
        ImportError: It has no such class, or several; the message names what was seen.
    """
    base = _openenv_class("openenv.core.env_client", "EnvClient")
    package = _import_package(env_name)
    scan = _Scan()
    exported: list[Any] = [
        getattr(package, name, None) for name in getattr(package, "__all__", dir(package))
    ]
    scan.found = [
        cls for cls in exported if _is_subclass(cls, base) and cls.__module__.startswith(env_name)
    ]
    if not scan.found:
        scan.visit(f"{env_name}.client", base)
        scan.found = [cls for cls in scan.found if cls.__module__.startswith(env_name)]
    if len(scan.found) != 1:
        raise ImportError(_what_was_seen(env_name, "EnvClient", scan.found, scan), name=env_name)
    return scan.found[0]


def classes_of_client(client_cls: type) -> ClientClasses:
    """Return a client class with the Action and the Observation it is declared for."""
    mcp = _loaded("openenv.core.mcp_client", "MCPToolClient")
    if mcp is not None and _is_subclass(client_cls, mcp):
        declared, observation = _type_arguments(client_cls, stop_at="MCPToolClient")
        call = _openenv_class("openenv.core.env_server.mcp_types", "CallToolAction")
        return ClientClasses(client_cls, declared or call, observation)
    return ClientClasses(client_cls, *_type_arguments(client_cls))


def action_class_of_environment(env_cls: type) -> Any | None:
    """Return the Action of an Environment: its type argument, or the annotation of `step`."""
    mcp = _loaded("openenv.core.env_server.mcp_environment", "MCPEnvironment")
    if mcp is not None and _is_subclass(env_cls, mcp):
        return _openenv_class("openenv.core.env_server.mcp_types", "CallToolAction")
    return _type_arguments(env_cls)[0] or _annotated_action(cast("Any", env_cls).step)


def class_made_by(factory: Any) -> type | None:
    """Return the class a factory makes objects of; `None` of a function that does not say."""
    while isinstance(factory, functools.partial):
        factory = cast("Any", factory).func
    if isinstance(factory, type):
        return factory
    try:
        made = typing.get_type_hints(factory).get("return")
    except (NameError, TypeError):
        return None
    return made if isinstance(made, type) and hasattr(made, "step") else None


def missing_arguments(factory: Any, given: Mapping[str, Any]) -> str:
    """Return which arguments a factory needs and was not given, with their types; or nothing."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    missing = [
        str(parameter)
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in given
    ]
    return f"; it needs env_kwargs with {', '.join(missing)}" if missing else ""


def is_network_client(candidate: object) -> bool:
    """Tell whether it is a class of OpenEnv's clients or of ours, and no Environment."""
    if not isinstance(candidate, type):
        return False
    return any(base.__name__ in _NETWORK_CLIENTS for base in candidate.__mro__)


def _import_package(env_name: str) -> types.ModuleType:
    try:
        return import_module(env_name)
    except ModuleNotFoundError as error:
        if error.name != env_name:
            raise
        raise ModuleNotFoundError(
            f"env_name={env_name!r} is not installed here: install the environment package "
            f'(`pip install -e path/to/envs/{env_name}`), or give env_cls="module:Class"',
            name=env_name,
        ) from error


def _openenv_class(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "openenv":
            raise
        raise ModuleNotFoundError(
            "running an OpenEnv environment in this process needs the openenv package, which is "
            "not installed: run `pip install twinkle-envs-openenv[embedded]`",
            name="openenv",
        ) from error


def _loaded(module: str, name: str) -> Any | None:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _path_of_server(env_name: str) -> list[Path]:
    try:
        server = import_module(f"{env_name}.server")
    except ModuleNotFoundError as error:
        if error.name != f"{env_name}.server":
            raise
        raise ModuleNotFoundError(
            f"env_name={env_name!r} is installed, but has no {error.name!r}, where the packages of "
            "OpenEnv have their Environment class: give env_cls='module:Class'",
            name=error.name,
        ) from error
    return [Path(each) for each in getattr(server, "__path__", ())]


def _server_modules(path: list[Path], server: str) -> tuple[list[str], list[str]]:
    """Split the modules of the server into those likely to define an Environment and the rest."""
    likely, rest = [server], list[str]()
    for name, file in _modules_below(path, f"{server}."):
        (likely if _defines_environment(file) else rest).append(name)
    return likely, rest


def _modules_below(path: list[Path], prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield modules with their files. None is imported: the answer is the same at any time."""
    for info in pkgutil.iter_modules([str(each) for each in path], prefix):
        last = info.name.rpartition(".")[2]
        if last in _ENTRY_POINTS:
            continue
        folders = [each / last for each in path if (each / last).is_dir()]
        files = [each / "__init__.py" for each in folders] if info.ispkg else []
        files += [each / f"{last}.py" for each in path]
        yield info.name, next((file for file in files if file.is_file()), Path(last))
        if info.ispkg:
            yield from _modules_below(folders, f"{info.name}.")


def _defines_environment(file: Path) -> bool:
    tree = _syntax_of(file)
    if tree is None:
        return False
    return any(
        "environment" in ast.unparse(base).lower()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    )


def _served(server: list[Path], candidates: list[type]) -> list[type]:
    """Keep the candidates that `server/app.py` passes to the app factory, else those it names."""
    trees = [tree for each in server if (tree := _syntax_of(each / "app.py")) is not None]
    if not trees:
        return candidates
    tree = trees[0]
    by_name = {cls.__name__: cls for cls in candidates}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("_app"):
            continue
        given = node.args[:1] or [k.value for k in node.keywords if k.arg == "env"]
        names = set(_names(given))
        for name in list(names):
            if name in functions:
                names |= set(_names([functions[name]]))
            elif (value := _assigned(tree.body, name)) is not None:
                names |= set(_names([value]))
        served = [by_name[name] for name in by_name if name in names]
        if served:
            return served
    named = set(_names([tree]))
    return [cls for name, cls in by_name.items() if name in named] or candidates


def _assigned(body: list[ast.stmt], name: str) -> ast.expr | None:
    """Return what a name is assigned last; where it depends, what holds without any setting."""
    found: ast.expr | None = None
    for node in body:
        if isinstance(node, ast.Assign) and name in _names(node.targets):
            found = node.value
        elif isinstance(node, ast.If):
            found = _assigned(node.orelse or node.body, name) or found
        elif isinstance(node, ast.Try):
            found = _assigned(node.body, name) or found
    return found


def _names(nodes: list[Any]) -> Iterator[str]:
    for node in nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.Name):
                yield child.id
            elif isinstance(child, ast.Attribute):
                yield child.attr


def _syntax_of(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _classes_of(module: types.ModuleType, base: type) -> list[type]:
    return [
        cls
        for cls in vars(module).values()
        if _is_subclass(cls, base) and cls.__module__ == module.__name__
    ]


def _is_subclass(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base) and cls is not base


def _client_action(env_name: str) -> Any | None:
    """Take the Action from the package's client, for environments that declare none."""
    try:
        return classes_of_client(find_client_class(env_name)).action_cls
    except Exception:  # a client that does not import says nothing of the environment
        return None


def _type_arguments(cls: type, *, stop_at: str | None = None) -> tuple[Any | None, Any | None]:
    """Return the type argument that is an Action and the one after it, of the nearest class."""
    for parent in cls.__mro__:
        if parent.__name__ == stop_at:
            break
        for declared in parent.__dict__.get("__orig_bases__", ()):
            arguments = typing.get_args(declared)
            if arguments and _is_action(arguments[0]):
                return arguments[0], arguments[1] if len(arguments) > 1 else None
    return None, None


def _annotated_action(step: Callable[..., Any]) -> Any | None:
    try:
        hints = typing.get_type_hints(step)
        name = list(inspect.signature(step).parameters)[1]  # after self
    except (NameError, TypeError, ValueError, IndexError, AttributeError):
        return None
    hint = hints.get(name)
    return hint if _is_action(hint) else None


def _is_action(hint: Any) -> bool:
    action: Any = _loaded("openenv.core.env_server.types", "Action")
    if action is None or not isinstance(hint, type):
        return False
    return hint is not action and hasattr(hint, "model_validate")


def _what_was_seen(where: str, what: str, found: list[type], scan: _Scan) -> str:
    saw = ", ".join(f"{cls.__module__}:{cls.__qualname__}" for cls in found)
    parts = [
        f"found {len(found)} candidates for the {what} class in {where!r}: {saw}"
        if found
        else f"found no {what} class in {where!r}"
    ]
    if not found and scan.imported:
        parts.append(f"looked into {', '.join(scan.imported)}")
    parts += [
        f"{module} does not import ({type(error).__name__}: {error})"
        for module, error in scan.failed.items()
    ]
    return f"{'; '.join(parts)}: give env_cls='module:Class'"
