import pickle
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

import twinkle_agentic.envs.agentenv as package
from twinkle_agentic.envs.agentenv import (
    CommandBrokenError,
    CommandOutput,
    ExecResult,
    SandboxRefusedError,
    SandboxSetupError,
)
from twinkle_agentic.envs.errors import ErrorKind, SandboxError, SandboxUnavailableError


def test_all_names_resolve() -> None:
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing  # noqa: B018


def test_what_is_not_exported_is_private() -> None:
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert {name for name in names if not name.startswith("_")} == {"errors"}


def test_making_an_env_imports_no_client_library() -> None:
    code = (
        "import sys; from twinkle_agentic.envs import AgentEnv, SandboxPool;"
        "AgentEnv(template='t', api_url='http://127.0.0.1:1', pool=SandboxPool()).tools();"
        "bad = {'e2b', 'httpx', 'connectrpc', 'pyqwest', 'ray', 'openenv'} & set(sys.modules);"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "error",
    [
        SandboxSetupError("it failed", command="x", exit_code=3, output="o", retryable=True),
        SandboxRefusedError("no"),
        CommandBrokenError("broke", output="half"),
    ],
)
def test_errors_pickle(error: Any) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
    assert twin.retryable is error.retryable


def test_a_refusal_is_not_retryable_and_is_a_sandbox_error() -> None:
    assert issubclass(SandboxRefusedError, SandboxUnavailableError)
    assert issubclass(SandboxSetupError, SandboxError)
    assert SandboxRefusedError("x").retryable is False
    assert SandboxRefusedError.kind is ErrorKind.ENV


def test_exec_result_pickles() -> None:
    result = ExecResult(stdout="a", exit_code=1)
    assert pickle.loads(pickle.dumps(result)) == result


def test_the_output_of_a_command_pickles_with_its_exit_code() -> None:
    twin = pickle.loads(pickle.dumps(CommandOutput("a", exit_code=3, timed_out=True)))
    assert (twin, twin.exit_code, twin.timed_out) == ("a", 3, True)
