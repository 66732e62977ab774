# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""Real OpenEnv servers, several in one process because importing openenv takes seconds.

Prints the ports as one line of JSON when all are ready, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import board_env  # noqa: E402
import lab_env  # noqa: E402
import tool_env  # noqa: E402


def apps() -> dict[str, Any]:
    lab = (lab_env.LabAction, lab_env.LabObservation)
    made: dict[str, Any] = {
        "lab": create_app(lab_env.LabEnvironment, *lab, max_concurrent_envs=64),
        "tight": create_app(lab_env.LabEnvironment, *lab, max_concurrent_envs=1),
        "forgetful": create_app(lab_env.ForgetfulEnvironment, *lab, max_concurrent_envs=8),
        "broken": create_app(lab_env.BrokenEnvironment, *lab, max_concurrent_envs=8),
        "undescribed": create_app(
            lab_env.LabEnvironment,
            lab_env.LabAction,
            lab_env.SnapshotObservation,
            max_concurrent_envs=8,
        ),
        "board": create_app(
            board_env.BoardEnvironment,
            board_env.BoardAction,
            board_env.BoardObservation,
            max_concurrent_envs=8,
        ),
        "code": create_app(
            lab_env.CodeEnvironment,
            lab_env.CodeAction,
            lab_env.CodeObservation,
            max_concurrent_envs=8,
        ),
        "tools": create_app(
            tool_env.ToolEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=8
        ),
    }
    cookbook = HERE.parents[3] / "cookbook" / "rl" / "envs"
    if (cookbook / "word_game_env").is_dir():
        sys.path.insert(0, str(cookbook))
        from word_game_env.models import WordGameAction, WordGameObservation
        from word_game_env.server.word_game_environment import WordGameEnvironment

        made["word_game"] = create_app(
            WordGameEnvironment, WordGameAction, WordGameObservation, max_concurrent_envs=8
        )
    return made


async def main() -> None:
    wanted = sys.argv[1:]
    made = {name: app for name, app in apps().items() if not wanted or name in wanted}
    servers: list[uvicorn.Server] = []
    ports: dict[str, int] = {}
    running: list[asyncio.Task[None]] = []
    for name, app in made.items():
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        ports[name] = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        server.capture_signals = _no_signals  # type: ignore[method-assign]
        servers.append(server)
        running.append(asyncio.create_task(server.serve(sockets=[listener])))
    while not all(server.started for server in servers):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers:
        server.should_exit = server.force_exit = True
    await asyncio.gather(*running)


def _no_signals() -> Any:
    from contextlib import nullcontext

    return nullcontext()


if __name__ == "__main__":
    asyncio.run(main())
