"""Open an OpenEnv environment to many sessions at once.

Run it from this folder:

    pip install twinkle-openenv-server
    MAX_CONCURRENT_ENVS=64 uvicorn server_app:app --port 8000 --workers 4

Each WebSocket connection has an environment of its own. OpenEnv's own server lets in one connection
only, unless two things are said; `concurrent_app` asks for the same two:

1. The environment class declares `SUPPORTS_CONCURRENT_SESSIONS = True`. OpenEnv's own `coding_env`
   does not, so it is subclassed. Declare it only where it is true: no two objects of the class
   share a file, a port or a global.
2. `max_concurrent_envs` says how many. The limit is per worker process: the server above holds
   4 x 64 = 256 sessions. A connection that meets a full worker waits in its queue (`max_queue`,
   `queue_timeout_s`) and is refused with `CAPACITY_REACHED` after that.

Your own environment is opened the same way: replace `ConcurrentCodingEnv` and the three types.
"""

from __future__ import annotations

from starlette.applications import Starlette

from openenv_server.coding_types import CodeAction, CodeObservation, CodeState
from openenv_server.concurrent import concurrent_app
from openenv_server.environment import CodingEnvironment
from openenv_server.session import Sessions
from openenv_server.settings import Settings

# MAX_CONCURRENT_ENVS and the other variables; a bad one ends the process with its name.
settings = Settings.load()
sessions = Sessions(settings.limits)  # starts the interpreters; entered with the application


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
        super().__init__(sessions=sessions)


app: Starlette = concurrent_app(
    ConcurrentCodingEnv,  # the class: one object per session
    CodeAction,
    CodeObservation,
    CodeState,
    name="coding_env",
    max_concurrent_envs=settings.max_concurrent_envs,
    max_queue=settings.max_queue,
    queue_timeout_s=settings.queue_timeout_s,
    lifespan=lambda: sessions,
)
