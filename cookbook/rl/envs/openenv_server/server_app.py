"""Open an OpenEnv environment to many sessions at once.

Run it from this folder:

    pip install twinkle-openenv-server
    MAX_CONCURRENT_ENVS=64 uvicorn server_app:app --port 8000 --workers 4

OpenEnv gives each WebSocket connection an environment of its own, but lets in one connection only,
unless two things are said:

1. The environment class declares `SUPPORTS_CONCURRENT_SESSIONS = True`. OpenEnv's own `coding_env`
   does not, so it is subclassed. Declare it only where it is true: no two objects of the class
   share a file, a port or a global.
2. `create_app` gets `max_concurrent_envs`. The limit is per worker process: the server above holds
   4 x 64 = 256 sessions. One connection too many is told `CAPACITY_REACHED`; with several workers
   that can happen while another one has room, so clients try again (`OpenEnvClient` does).

Your own environment is opened the same way: replace `ConcurrentCodingEnv` and the three types.
"""

from __future__ import annotations

from fastapi import FastAPI

from openenv_server.concurrent import concurrent_app
from openenv_server.environment import CodingEnvironment
from openenv_server.settings import Settings
from openenv_server.wire import CodeAction, CodeObservation, CodeState

# MAX_CONCURRENT_ENVS and the other variables; a bad one ends the process with its name.
settings = Settings.from_environ()


class ConcurrentCodingEnv(CodingEnvironment):
    """The coding environment; a subclass of `coding_env`'s where that package is installed.

    For an environment of yours:

        from my_env.models import MyAction, MyObservation, MyState
        from my_env.server.my_environment import MyEnvironment

        class ConcurrentMyEnv(MyEnvironment):
            SUPPORTS_CONCURRENT_SESSIONS = True
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(settings)


app: FastAPI = concurrent_app(
    ConcurrentCodingEnv,  # the class: one object per session
    CodeAction,
    CodeObservation,
    CodeState,
    name="coding_env",
    max_concurrent_envs=settings.max_concurrent_envs,
)
