"""The command `twinkle-sandbox-server`."""

from __future__ import annotations

import logging
import os
import resource
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
import uvicorn

from sandbox_server.app import create_app
from sandbox_server.auth import is_loopback
from sandbox_server.config import BASE_NAMES, ServerConfig
from sandbox_server.limited_http import MAX_HEAD_BYTES, LimitedProtocol, OncePerSecond, limits
from sandbox_server.templates import DataDirInUseError
from twinkle_isolation import Limits
from twinkle_isolation.listening import CannotListenError, listen, url_of

_NOT_STARTED = 3  # the exit code of uvicorn itself where the application does not start

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinkle-sandbox-server {version('twinkle-sandbox-server')}")
        raise typer.Exit


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one and prints it.")
    ] = 8800,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TWINKLE_SANDBOX_API_KEY", help="Key that clients send as X-API-Key."),
    ] = None,
    isolation: Annotated[
        Literal["bubblewrap", "process"],
        typer.Option(
            help="`process` is no boundary: programs see the host's files and network. It needs a "
            "key, and loopback."
        ),
    ] = "bubblewrap",
    share: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directory of the host, read-only in sandboxes; its bin/ comes first in PATH.",
        ),
    ] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="More names for the bare host, beside `base`.")
    ] = None,
    network: Annotated[
        bool, typer.Option(help="Let sandboxes use the host's network, its loopback included.")
    ] = False,
    max_sandboxes: Annotated[int, typer.Option(min=1, help="Most sandboxes at once.")] = 256,
    total_memory_mb: Annotated[
        int | None,
        typer.Option(min=1, help="Memory and files of all sandboxes together, as allowed to them."),
    ] = None,
    spares: Annotated[int, typer.Option(min=0, help="Sandboxes kept ready beyond those.")] = 8,
    timeout_s: Annotated[
        float, typer.Option(min=1, help="Lifetime when a request names none.")
    ] = 300.0,
    max_timeout_s: Annotated[
        float, typer.Option(min=1, help="Longest lifetime, and longest pause.")
    ] = 86400.0,
    max_lifetime_s: Annotated[
        float, typer.Option(min=1, help="Longest life of a sandbox, renewals included.")
    ] = 604800.0,
    memory_mb: Annotated[int, typer.Option(min=32, help="Memory of one sandbox.")] = 1024,
    disk_mb: Annotated[
        int, typer.Option(min=1, help="Files of one sandbox (held in memory).")
    ] = 512,
    processes: Annotated[int, typer.Option(min=1, help="Processes of one sandbox.")] = 128,
    open_files: Annotated[int, typer.Option(min=16, help="Open files of one process.")] = 1024,
    max_output_mb: Annotated[
        int, typer.Option(min=1, help="Output of one command, or of one run of code.")
    ] = 64,
    run_timeout_s: Annotated[
        float, typer.Option(min=1, help="Longest run of one piece of code (`run_code`).")
    ] = 3600.0,
    answer_timeout_s: Annotated[
        float, typer.Option(min=1, help="A sandbox that answers nothing for so long is killed.")
    ] = 60.0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep templates and snapshots here, over restarts.")
    ] = None,
    domain: Annotated[
        str, typer.Option(help="Requests to PORT-ID.DOMAIN are for sandbox ID; told to clients.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Serve E2B-compatible sandboxes on this machine."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if not is_loopback(host) and not api_key:
        raise typer.BadParameter(
            f"--host {host} is not loopback: give --api-key (or TWINKLE_SANDBOX_API_KEY)"
        )
    if isolation == "process" and not is_loopback(host):
        raise typer.BadParameter(
            f"--isolation process is no boundary, and --host {host} is not loopback: use loopback"
        )
    if not api_key and (network or isolation == "process"):
        asked = "--network" if network else "--isolation process"
        raise typer.BadParameter(
            f"{asked} lets programs in sandboxes reach this server, and each could read and kill "
            "all others: give --api-key (or TWINKLE_SANDBOX_API_KEY)"
        )
    config = ServerConfig(
        api_key=api_key or None,
        isolation=isolation,
        shares=tuple(str(path) for path in share or ()),
        limits=Limits(
            memory_bytes=memory_mb << 20,
            disk_bytes=disk_mb << 20,
            processes=processes,
            open_files=open_files,
        ),
        max_sandboxes=max_sandboxes,
        total_memory_bytes=None if total_memory_mb is None else total_memory_mb << 20,
        spares=spares,
        default_timeout_s=min(timeout_s, max_timeout_s),
        max_timeout_s=max_timeout_s,
        max_lifetime_s=max_lifetime_s,
        max_output_bytes=max_output_mb << 20,
        run_timeout_s=run_timeout_s,
        answer_timeout_s=answer_timeout_s,
        network=network,
        templates=(*BASE_NAMES, *(template or ())),
        data_dir=data_dir,
        domain=domain,
    )
    try:
        sockets = listen(host, port)
    except CannotListenError as error:
        typer.echo(f"twinkle-sandbox-server: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        server = create_app(config)
    except (DataDirInUseError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--data-dir") from error
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # every sandbox and every client costs descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits.connections = max(16, int(0.4 * hard))  # the sandboxes and files need the others
    for handler in logging.getLogger().handlers:
        handler.addFilter(OncePerSecond())
    typer.echo(f"listening on {url_of(host, sockets)} (pid {os.getpid()})")
    settings = uvicorn.Config(
        server,
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        loop="asyncio",  # uvloop starts processes three to four times slower
        log_level=log_level.lower(),
        access_log=False,
        timeout_keep_alive=300,
        timeout_graceful_shutdown=3,
        lifespan="on",
        ws="none",
        date_header=False,
        server_header=False,
    )
    running = uvicorn.Server(settings)
    running.run(sockets=sockets)
    if not running.started:  # older versions of uvicorn leave it at that
        raise typer.Exit(_NOT_STARTED)


def main() -> None:
    """Run the command."""
    app()
