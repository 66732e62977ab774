from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import twinkle_agentic.envs as envs

HEAVY = [
    "openenv",
    "e2b",
    "ray",
    "httpx",
    "jsonschema",
    "pydantic",
    "aiohttp",
    "websockets",
    "torch",
]


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.strip()


def type_checking_imports() -> dict[str, str]:
    tree = ast.parse(Path(str(envs.__file__)).read_text("utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    return {
        alias.asname or alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_three_lists_of_public_names_are_equal() -> None:
    exports = envs._EXPORTS  # pyright: ignore[reportPrivateUsage]
    assert envs.__all__ == sorted(envs.__all__)
    assert set(envs.__all__) == set(exports)
    assert type_checking_imports() == {name: module for name, (module, _) in exports.items()}


@pytest.mark.parametrize("name", ["Env", "EnvTool", "ErrorKind", "StepResult", "TwinkleEnvError"])
def test_names_of_core_are_found_on_first_use(name: str) -> None:
    module, distribution = envs._EXPORTS[name]  # pyright: ignore[reportPrivateUsage]
    assert getattr(envs, name) is getattr(importlib.import_module(module), name)
    assert distribution == "twinkle-envs-core"
    assert name in dir(envs)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Enw'"):
        envs.Enw  # noqa: B018


def test_namespace_has_no_init_of_its_own() -> None:
    assert getattr(importlib.import_module("twinkle_agentic"), "__file__", None) is None


def test_import_loads_no_client_library() -> None:
    script = f"""
        import sys
        import twinkle_agentic.envs
        from twinkle_agentic.envs import Env, EnvTool, StepResult
        import twinkle_agentic._aio.loop
        print(sorted({{m.partition(".")[0] for m in sys.modules}} & set({HEAVY!r})))
    """
    assert run(script) == "[]"


def test_missing_distribution_is_named() -> None:
    script = """
        import sys
        sys.modules["twinkle_agentic.envs.agentenv"] = None  # as if it were not installed
        import twinkle_agentic.envs as envs
        try:
            from twinkle_agentic.envs import AgentEnv
        except ModuleNotFoundError as error:
            print(error.name, error, sep="|")
    """
    name, message = run(script).split("|")
    assert name == "twinkle_agentic.envs.agentenv"
    assert message == (
        "AgentEnv needs the twinkle-envs-agentenv distribution, which is not installed: "
        'run "pip install twinkle-envs-agentenv"'
    )


GUEST = """
    import sys, types
    from pathlib import Path
    import tempfile
    root = Path(tempfile.mkdtemp())
    (root / "agentenv").mkdir()
    (root / "agentenv" / "__init__.py").write_text({source!r})
    import twinkle_agentic.envs as envs
    envs.__path__ = [str(root)]
    try:
        from twinkle_agentic.envs import AgentEnv
    except ImportError as error:
        print(type(error).__name__, error.name, error, sep="|")
"""


def test_import_missing_inside_a_guest_is_reported_as_such() -> None:
    kind, name, _ = run(GUEST.format(source="import no_such_client\n")).split("|")
    assert (kind, name) == ("ModuleNotFoundError", "no_such_client")


def test_guest_too_old_for_a_name_is_told_to_upgrade() -> None:
    kind, name, message = run(GUEST.format(source="")).split("|")
    assert (kind, name) == ("ImportError", "twinkle_agentic.envs.agentenv")
    assert 'run "pip install --upgrade twinkle-envs-agentenv"' in message
