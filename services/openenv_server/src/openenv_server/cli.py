"""Console script `twinkle-openenv-server`; its options are the fields of `settings.Settings`."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from pydantic.fields import FieldInfo

from openenv_server._supervisor import Supervisor
from openenv_server.settings import Settings, SettingsError, variable_of
from twinkle_isolation.listening import CannotListenError, listen

__all__ = ["main"]

_command = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinkle-openenv-server {version('twinkle-openenv-server')}")
        raise typer.Exit


def serve(**given: Any) -> None:
    """Serve a Python coding environment over the OpenEnv protocol.

    Every session is an interpreter of its own. OpenEnv's stock client works against it:

    `GenericEnvClient(base_url="http://127.0.0.1:8000")`

    `GET /health`, `/capacity` and `/metrics` tell how it fares. SIGTERM drains it.

    On a network: `OPENENV_SERVER_TOKEN=... twinkle-openenv-server --host 0.0.0.0`, and
    `OpenEnvClient(..., token=...)`, or `headers={"Authorization": "Bearer ..."}` for another.

    The same server in an ASGI server of yours: `uvicorn openenv_server.app:app`, with the
    environment variables named below. Each of its workers then has sessions and a queue of its own.
    """
    try:
        settings = Settings.load(**{k: v for k, v in given.items() if v is not None})
        sockets = listen(settings.host, settings.port)
    except (SettingsError, CannotListenError) as error:
        typer.echo(f"twinkle-openenv-server: {error}", err=True)
        raise typer.Exit(2) from None
    code = asyncio.run(Supervisor(settings, sockets).run())
    if code:
        raise typer.Exit(code)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = field.annotation is bool
    shown: Any = field.default
    if type(shown) is tuple:
        shown = ",".join(cast("tuple[str, ...]", shown))
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        envvar=variable_of(name),
        help=field.description,
        metavar=None if flag else "VALUE",
        show_default=False if flag or shown == "" else str(shown),
    )
    kind = bool | None if flag else str | None  # pydantic checks the text, in one line
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _with_version(show_version: bool = False, **given: Any) -> None:
    serve(**given)


_VERSION = inspect.Parameter(
    "show_version",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version."),
    ],
)


def _register() -> None:
    parameters = [_parameter(name, field) for name, field in Settings.model_fields.items()]
    parameters.append(_VERSION)
    function: Any = _with_version
    function.__doc__ = serve.__doc__
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    _command.command()(function)


_register()


def main() -> None:
    """Run the command line."""
    _command()


if __name__ == "__main__":
    main()
