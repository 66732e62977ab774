"""What is installed, which distribution each module comes from, which servers answer."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from twinkle_agentic.rollout.cli.options import seconds
from twinkle_agentic.rollout.cli.probes import Probe, probe_model, probe_openenv, probe_sandboxes
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED

__all__ = ["ModuleOrigin", "doctor", "module_origins", "print_probes"]

_OWN = {
    "twinkle_agentic.tools.tool_manager": "twinkle-tools",
    "twinkle_agentic.envs.base": "twinkle-envs-core",
    "twinkle_agentic.envs.openenv": "twinkle-envs-openenv",
    "twinkle_agentic.envs.agentenv": "twinkle-envs-agentenv",
    "twinkle_agentic.rollout.api_multi_turn": "twinkle-rollout",
    "twinkle_agentic.protocol.openai": "twinkle-rollout",
}
"""Module -> the distribution that must provide it."""

_OTHERS = (
    "twinkle-isolation",
    "twinkle-openenv-server",
    "twinkle-sandbox-server",
    "twinkle-kit",
    "openenv",
    "e2b",
    "ray",
    "websockets",
    "aiohttp",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOrigin:
    """Where one of our modules comes from.

    Attributes:
        module: Its dotted name.
        expected: The distribution that should provide it.
        provider: The one that does: its file is the one on disk. `None` where the module is
            missing; `"?"` where no installed distribution has that very file.
        path: The file, `None` where the module is missing.
    """

    module: str
    expected: str
    provider: str | None
    path: str | None

    @property
    def ok(self) -> bool:
        """Whether the module is absent, or comes from where it should."""
        return self.provider in (None, self.expected)


def doctor(
    console: Console,
    *,
    openenv_url: Annotated[list[str] | None, typer.Option(help="An OpenEnv server to ask.")] = None,
    sandbox_url: Annotated[
        list[str] | None, typer.Option(help="A sandbox server to ask; its key is E2B_API_KEY.")
    ] = None,
    model_url: Annotated[
        list[str] | None,
        typer.Option(help="A model endpoint to ask, with its /v1; its key is OPENAI_API_KEY."),
    ] = None,
    timeout_s: Annotated[float, seconds("Seconds for each answer.")] = 5.0,
) -> int:
    """Say what is installed, where each module comes from, and whether servers answer.

    Exit code 1 where a module comes from the wrong distribution, or a server does not answer or is
    of another kind.
    """
    model_key, sandbox_key = os.environ.get("OPENAI_API_KEY"), os.environ.get("E2B_API_KEY")
    found = [
        *(probe_openenv(url, timeout_s=timeout_s) for url in openenv_url or ()),
        *(
            probe_sandboxes(url, api_key=sandbox_key, timeout_s=timeout_s)
            for url in sandbox_url or ()
        ),
        *(probe_model(url, api_key=model_key, timeout_s=timeout_s) for url in model_url or ()),
    ]
    console.print(f"Python {platform.python_version()} on {platform.platform()}, {sys.executable}")
    sound = _print_installed(console)
    if found:
        print_probes(console, found)
    return 0 if sound and all(probe.ok for probe in found) else EXIT_FAILED


def _print_installed(console: Console) -> bool:
    """Print versions and the origin of each module; return whether the origins are right."""
    versions = Table("distribution", "version", title="Versions", title_justify="left")
    for name in (*dict.fromkeys(_OWN.values()), *_OTHERS):
        versions.add_row(name, _version(name) or "[dim]not installed[/]")
    console.print(versions)
    origins = module_origins()
    table = Table("module", "provided by", title="Modules", title_justify="left")
    for origin in origins:
        style = None if origin.ok else "red"
        table.add_row(origin.module, origin.provider or "[dim]not installed[/]", style=style)
    console.print(table)
    wrong = [origin for origin in origins if not origin.ok]
    for origin in wrong:
        console.print(
            f"[red]{origin.module} ({origin.path}) comes from {origin.provider}, expected "
            f"{origin.expected}: "
            f"run `pip install --force-reinstall --no-deps {origin.expected}`[/]",
            soft_wrap=True,
        )
    namespace = find_spec("twinkle_agentic")
    if namespace is not None and namespace.origin:
        console.print(
            f"[yellow]{namespace.origin} closes the shared twinkle_agentic namespace (twinkle-kit "
            "does): install our distributions after it, and as wheels, for it hides editable "
            "ones.[/]",
            soft_wrap=True,
        )
    return not wrong


def print_probes(console: Console, probes: Sequence[Probe]) -> None:
    """Print what each server answered."""
    # Folded, for an answer may end with the address to give instead.
    folded = [Column(name, overflow="fold") for name in ("server", "address", "answer")]
    servers = Table(*folded, "ms", title="Servers", title_justify="left")
    for probe in probes:
        servers.add_row(
            probe.name,
            escape(probe.url),
            escape(probe.detail),
            f"{probe.seconds * 1000:.0f}",
            style=None if probe.ok else "red",
        )
    console.print(servers)


def module_origins() -> list[ModuleOrigin]:
    """Find out which distribution provides each of our modules, by the hash of the file on disk.

    Two distributions can claim the same path; the one whose record has the hash of the file was
    installed last. An editable install has no record of its modules: its source tree is named.
    """
    origins: list[ModuleOrigin] = []
    for module, expected in _OWN.items():
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:
            spec = None
        path = spec.origin if spec else None
        provider = _provider(Path(path), expected) if path else None
        origins.append(ModuleOrigin(module=module, expected=expected, provider=provider, path=path))
    return origins


def _provider(path: Path, expected: str) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    for distribution in distributions():
        for file in distribution.files or ():
            if file.name != path.name or file.hash is None or file.hash.value != encoded:
                continue
            if Path(str(distribution.locate_file(file))).resolve() == path.resolve():
                return distribution.metadata["Name"]
    # No record has it: an editable install, whose source tree carries the name of the distribution.
    return expected if expected in path.parts else "?"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
