from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

from twinkle_agentic.envs import errors
from twinkle_agentic.envs.errors import ErrorKind, TwinkleEnvError

CLASSES = [
    getattr(errors, name)
    for name in errors.__all__
    if isinstance(getattr(errors, name), type) and issubclass(getattr(errors, name), Exception)
]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("retryable", [None, True, False])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_pickle(cls: Any, retryable: bool | None, protocol: int) -> None:
    error = cls("asked for a, found 'b'", retryable=retryable)
    error.add_note("a note")
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == "asked for a, found 'b'"
        assert (twin.kind, twin.retryable) == (error.kind, error.retryable)
        assert twin.__notes__ == ["a note"]
    assert error.retryable is (cls.retryable if retryable is None else retryable)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_without_a_message_pickles(cls: Any) -> None:
    assert str(pickle.loads(pickle.dumps(cls()))) == ""


# What a worker process does when its environment raises: the error goes to the caller as a pickle.
_WORKER = """
import pickle, sys
from twinkle_agentic.envs import errors
made = []
for name in sys.argv[1:]:
    cls = getattr(errors, name)
    try:
        raise cls("gone", retryable=not cls.retryable)
    except cls as error:
        made.append(error)
sys.stdout.buffer.write(pickle.dumps(made))
"""


def test_errors_cross_a_process_with_their_fields() -> None:
    names = [cls.__name__ for cls in CLASSES]
    done = subprocess.run(
        [sys.executable, "-c", _WORKER, *names], capture_output=True, check=True, timeout=60
    )
    received: list[TwinkleEnvError] = pickle.loads(done.stdout)
    assert [type(error) for error in received] == list(CLASSES)
    for error, cls in zip(received, CLASSES, strict=True):
        assert str(error) == "gone"
        assert error.retryable is not cls.retryable


@pytest.mark.parametrize(
    ("cls", "refines"),
    [
        (errors.EnvError, RuntimeError),
        (errors.EnvTimeoutError, TimeoutError),
        (errors.SessionClosedError, ConnectionError),
        (errors.CapacityError, ConnectionError),
        (errors.SandboxUnavailableError, errors.SandboxError),
        (errors.SandboxLostError, errors.SandboxError),
        (errors.WorkerLostError, errors.PoolError),
    ],
)
def test_error_is_caught_as_what_it_refines(cls: Any, refines: Any) -> None:
    with pytest.raises(refines):
        raise cls("x")
    assert issubclass(cls, TwinkleEnvError)


def test_kinds_are_plain_text_for_programs() -> None:
    assert [str(kind) for kind in ErrorKind] == [
        "tool",
        "env",
        "timeout",
        "session_lost",
        "sandbox_lost",
        "capacity",
    ]
    assert all(isinstance(cls("x").kind, ErrorKind) for cls in CLASSES)
