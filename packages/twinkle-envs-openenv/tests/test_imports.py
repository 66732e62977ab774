"""What is loaded when: looked up in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ["openenv", "e2b", "ray", "torch", "httpx"]


def loaded_by(code: str, *names: str) -> list[str]:
    loaded = f"[name for name in {list(names)!r} if name in sys.modules]"
    script = f"import json, sys\n{code}\nprint(json.dumps({loaded}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_envs_loads_no_client_library() -> None:
    assert loaded_by("import twinkle_agentic.envs", *HEAVY, "websockets") == []


def test_the_openenv_package_loads_nothing_until_a_name_is_used() -> None:
    code = "import twinkle_agentic.envs.openenv"
    assert loaded_by(code, *HEAVY, "websockets", "asyncio") == []


def test_a_client_loads_websockets_alone() -> None:
    code = (
        "from twinkle_agentic.envs.openenv import OpenEnvClient\n"
        "OpenEnvClient(env_name='coding_env', base_url='http://127.0.0.1:1')"
    )
    assert loaded_by(code, *HEAVY, "websockets", "pydantic", "jsonschema") == ["websockets"]


def test_core_finds_the_names() -> None:
    code = "from twinkle_agentic.envs import OpenEnv, OpenEnvClient; assert OpenEnv.__module__"
    assert loaded_by(code, *HEAVY) == []
