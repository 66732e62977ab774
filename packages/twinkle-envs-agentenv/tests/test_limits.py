import threading

import pytest

from twinkle_agentic.envs.agentenv._limits import ConcurrencyLimiter, limiter_of
from twinkle_agentic.envs.errors import SandboxUnavailableError


def test_no_more_pass_than_the_limit() -> None:
    limiter, barrier = ConcurrencyLimiter("raise max_concurrent_creates"), threading.Barrier(8)

    def work() -> None:
        barrier.wait(5)
        for _ in range(50):
            with limiter.place(3, timeout_s=10):
                assert limiter.running <= 3

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert limiter.running == 0


def test_waiting_is_bounded_and_leaves_nothing() -> None:
    limiter = ConcurrencyLimiter("raise max_concurrent_creates")
    with limiter.place(1, timeout_s=1):
        with (
            pytest.raises(SandboxUnavailableError, match="max_concurrent_creates"),
            limiter.place(1, timeout_s=0.01),
        ):
            raise AssertionError("passed")
        with limiter.place(2, timeout_s=0.01):
            assert limiter.running == 2
    with limiter.place(1, timeout_s=0.01):
        assert limiter.running == 1
    assert limiter.running == 0


def test_a_failing_body_frees_its_place() -> None:
    limiter = ConcurrencyLimiter("raise max_concurrent_creates")
    with pytest.raises(KeyError), limiter.place(1, timeout_s=1):
        raise KeyError
    assert limiter.running == 0


def test_one_limiter_per_server_and_kind() -> None:
    creations = limiter_of("http://a", "creations")
    assert creations is limiter_of("http://a", "creations")
    assert creations is not limiter_of("http://b", "creations")
    assert creations is not limiter_of("http://a", "commands")
