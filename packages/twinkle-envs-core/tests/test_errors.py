from __future__ import annotations

import copy
import multiprocessing
import pickle
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


def raise_in_child(cls: Any) -> None:
    raise cls("gone", retryable=not cls.retryable)


def test_errors_cross_a_process_with_their_fields() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for cls in CLASSES:
            with pytest.raises(cls, match="gone") as caught:
                pool.apply(raise_in_child, (cls,))
            assert caught.value.retryable is not cls.retryable


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
