import threading

import pytest

from twinkle_agentic.envs.agentenv.gate import Gate, command_gate, create_gate
from twinkle_agentic.envs.errors import SandboxUnavailableError


def test_no_more_pass_than_the_limit() -> None:
    gate, barrier = Gate("raise max_concurrent_creates"), threading.Barrier(8)

    def work() -> None:
        barrier.wait(5)
        for _ in range(50):
            with gate.pass_through(3, timeout_s=10):
                assert gate.running <= 3

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert gate.running == 0
    assert 1 <= gate.most <= 3


def test_waiting_is_bounded_and_leaves_nothing() -> None:
    gate = Gate("raise max_concurrent_creates")
    with gate.pass_through(1, timeout_s=1):
        with (
            pytest.raises(SandboxUnavailableError, match="max_concurrent_creates"),
            gate.pass_through(1, timeout_s=0.01),
        ):
            raise AssertionError("passed")
        with gate.pass_through(2, timeout_s=0.01):
            assert gate.running == 2
    with gate.pass_through(1, timeout_s=0.01):
        assert gate.running == 1
    assert gate.running == 0


def test_a_failing_body_frees_its_place() -> None:
    gate = Gate("raise max_concurrent_creates")
    with pytest.raises(KeyError), gate.pass_through(1, timeout_s=1):
        raise KeyError
    assert gate.running == 0


def test_one_gate_per_server_and_kind() -> None:
    assert create_gate("http://a") is create_gate("http://a")
    assert create_gate("http://a") is not create_gate("http://b")
    assert create_gate("http://a") is not command_gate("http://a")
