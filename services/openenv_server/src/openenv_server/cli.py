"""Console script `twinkle-openenv-server`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import resource
import socket
from importlib.metadata import version
from typing import Annotated, Any

import typer
import uvicorn
from uvicorn.config import LOG_LEVELS
from uvicorn.supervisors import Multiprocess

from openenv_server.settings import EXECUTOR_NAMES, Settings, SettingsError
from twinkle_isolation.listening import CannotListenError, listen, url_of

__all__ = ["main"]

_DEFAULT = Settings()
_NOT_STARTED = 3  # the exit code of uvicorn itself where the application does not start
_THREAD_BYTES = 16 * 2**20  # stack and allocator arena of a session's thread

_command = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinkle-openenv-server {version('twinkle-openenv-server')}")
        raise typer.Exit


@_command.command()
def serve(
    *,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. The server has no authentication and runs the code it "
            "is sent: open it to a network only where everybody on it may do that."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one and prints it.")
    ] = 8000,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Worker processes. One process runs the code of all its sessions on one core.",
        ),
    ] = 1,
    max_concurrent_envs: Annotated[
        str,
        typer.Option(
            envvar="MAX_CONCURRENT_ENVS",
            metavar="N",
            help="Sessions *per worker process*. The server holds workers times this; a "
            "connection that meets a full worker is refused with CAPACITY_REACHED.",
        ),
    ] = str(_DEFAULT.max_concurrent_envs),
    executor: Annotated[
        str,
        typer.Option(
            envvar="CODE_EXECUTOR",
            metavar="NAME",
            help=f"One of {', '.join(EXECUTOR_NAMES)}. `strict` does what CPython does or fails "
            "the step; `stock` is the interpreter of OpenEnv's coding_env, wrong values included.",
        ),
    ] = _DEFAULT.executor,
    step_timeout_s: Annotated[
        str,
        typer.Option(
            envvar="CODE_STEP_TIMEOUT_S",
            metavar="SECONDS",
            help="Seconds of wall time for one step.",
        ),
    ] = f"{_DEFAULT.step_timeout_s:g}",
    max_output_chars: Annotated[
        str,
        typer.Option(
            envvar="CODE_MAX_OUTPUT_CHARS",
            metavar="N",
            help="Characters kept of stdout and of stderr, each: head and tail.",
        ),
    ] = str(_DEFAULT.max_output_chars),
    max_code_chars: Annotated[
        str,
        typer.Option(
            envvar="CODE_MAX_CODE_CHARS",
            metavar="N",
            help="Longer code is a failed step; the session lives.",
        ),
    ] = str(_DEFAULT.max_code_chars),
    extra_imports: Annotated[
        str,
        typer.Option(
            envvar="CODE_EXTRA_IMPORTS",
            metavar="MODULES",
            help="Modules the code may import besides the interpreter's own, with commas between.",
        ),
    ] = ",".join(_DEFAULT.extra_imports),
    allowed_hosts: Annotated[
        str,
        typer.Option(
            envvar="ALLOWED_HOSTS",
            metavar="HOSTS",
            help="Host names, with commas between, under which pages in a browser and proxies on "
            "this machine may use the server, besides its own.",
        ),
    ] = ",".join(_DEFAULT.allowed_hosts),
    worker_memory_mb: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MB",
            help="Memory the data of one worker process may take (RLIMIT_DATA), without what its "
            "session threads need. All sessions of a worker share it: a step that meets it fails "
            "as the code's own MemoryError where it can be told that its session used the memory "
            "up, else as an error of the server. 0 is no limit.",
        ),
    ] = 4096,
    ping_interval_s: Annotated[
        float,
        typer.Option(
            min=0.5, metavar="SECONDS", help="Seconds between two WebSocket pings to each client."
        ),
    ] = 20.0,
    ping_timeout_s: Annotated[
        float,
        typer.Option(
            min=0.5,
            metavar="SECONDS",
            help="Seconds to wait for a pong. A client that died without a word gives its slot "
            "back after interval + timeout, plus the rest of the step it had running.",
        ),
    ] = 20.0,
    log_level: Annotated[
        str, typer.Option(help="critical, error, warning, info, debug or trace.")
    ] = "info",
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Serve a Python coding environment over the OpenEnv protocol.

    Every session has its own variables. OpenEnv's stock client works against it:

    `GenericEnvClient(base_url="http://127.0.0.1:8000")`

    The same server without this command: `uvicorn openenv_server.app:app --workers 4`, with the
    settings in the environment variables named below.
    """
    try:
        settings = Settings.from_environ(
            {
                "MAX_CONCURRENT_ENVS": max_concurrent_envs,
                "CODE_EXECUTOR": executor,
                "CODE_STEP_TIMEOUT_S": step_timeout_s,
                "CODE_MAX_OUTPUT_CHARS": max_output_chars,
                "CODE_MAX_CODE_CHARS": max_code_chars,
                "CODE_EXTRA_IMPORTS": extra_imports,
                "ALLOWED_HOSTS": allowed_hosts,
            }
        )
    except SettingsError as error:
        typer.echo(f"twinkle-openenv-server: {error}", err=True)
        raise typer.Exit(2) from None
    if log_level not in LOG_LEVELS:
        typer.echo(
            f"twinkle-openenv-server: --log-level is {log_level!r}: choose one of "
            f"{', '.join(LOG_LEVELS)}",
            err=True,
        )
        raise typer.Exit(2)
    try:
        sockets = listen(host, port)
    except CannotListenError as error:
        typer.echo(f"twinkle-openenv-server: {error}", err=True)
        raise typer.Exit(2) from None
    os.environ.update(settings.to_environ())  # the workers are new processes and read it there
    if worker_memory_mb:
        _limit_memory(worker_memory_mb * 2**20 + settings.max_concurrent_envs * _THREAD_BYTES)
    config = uvicorn.Config(
        "openenv_server.app:app",
        host=host,
        port=port,
        workers=workers,
        log_level=log_level,
        ws_ping_interval=ping_interval_s,
        ws_ping_timeout=ping_timeout_s,
        ws_max_size=settings.max_message_bytes,
    )
    # In uvicorn's words and by its logger: it says this itself only of a socket of its own.
    logging.getLogger("uvicorn.error").info(
        "Uvicorn running on %s (Press CTRL+C to quit)", url_of(host, sockets)
    )
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):  # it has shut down by then
        if workers > 1:
            _supervise(config, server, sockets)
        else:
            config.load()  # here and not in the loop, where Ctrl-C would wait for the imports
            server.run(sockets=sockets)
    if workers == 1 and not server.started:
        raise typer.Exit(_NOT_STARTED)


def _supervise(
    config: uvicorn.Config, server: uvicorn.Server, sockets: list[socket.socket]
) -> None:
    """Run the worker processes."""
    options: dict[str, Any] = {"sockets": sockets}
    if "target" in inspect.signature(Multiprocess).parameters:  # uvicorn before it was taken out
        options["target"] = server.run
    Multiprocess(config, **options).run()


def _limit_memory(size_bytes: int) -> None:
    """Set the limit for this process and those it starts, if there is not a lower one already."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or size_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, hard))


def main() -> None:
    """Run the command line."""
    _command()


if __name__ == "__main__":
    main()
