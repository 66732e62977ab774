"""Warm sandboxes."""

from typing import Any

import pytest

from twinkle_agentic.envs.agentenv import SandboxPool
from twinkle_agentic.envs.errors import PoolError

CREATE = ("POST", "/v2/sandboxes")


@pytest.fixture
def pool() -> Any:
    with SandboxPool(2) as made:
        yield made


def test_a_warm_sandbox_is_handed_over_set_up(server: Any, make_env: Any, pool: Any) -> None:
    env = make_env(pool=pool, setup_commands=["echo set up > /dev/stderr; echo done"])
    assert pool.prefill(env) == 2
    warm = set(server.sandboxes)
    assert env.reset().observation == "done\n[stderr]\nset up"
    assert env.sandbox_id in warm
    assert pool.stats().hits == 1
    assert pool.prefill(env) == 2
    assert len(server.sandboxes) == 3
    env.reset()
    assert pool.stats().hits == 2


def test_kinds_are_not_mixed(server: Any, make_env: Any, pool: Any) -> None:
    one = make_env(pool=pool, template="one")
    two = make_env(pool=pool, template="two")
    pool.prefill(one)
    two.reset()
    assert server.sandboxes[two.sandbox_id].body["templateID"] == "two"
    assert pool.stats().misses == 1


def test_a_dead_one_is_not_handed_over(server: Any, make_env: Any, pool: Any) -> None:
    env = make_env(pool=pool)
    pool.prefill(env)
    dead = set(server.sandboxes)
    for sandbox_id in dead:
        server.kill_sandbox(sandbox_id)
    env.reset()
    assert env.sandbox_id not in dead
    assert pool.stats().discarded == 2
    assert env.step("run_command", {"command": "echo ok"}).observation == "ok"


def test_close_kills_those_that_wait(server: Any, make_env: Any) -> None:
    with SandboxPool(3) as pool:
        env = make_env(pool=pool)
        pool.prefill(env)
        env.reset()
    assert list(server.sandboxes) == [env.sandbox_id]
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        env.reset()


def test_close_kills_those_that_are_still_starting(server: Any, make_env: Any) -> None:
    server.create_delay_s = 0.3
    pool: Any = SandboxPool(2)
    env = make_env(pool=pool)
    assert pool.prefill(env, timeout_s=0) == 0
    pool.close()
    assert server.sandboxes == {}
    assert pool.stats().starting == 0


def test_a_close_at_hand_over_leaves_nothing(server: Any, make_env: Any) -> None:
    pool = SandboxPool(1)
    env = make_env(pool=pool)
    assert pool.prefill(env) == 1

    def close_at_hand_over(method: str, path: str) -> None:
        if path == "/health":
            pool.close()

    server.on_request = close_at_hand_over
    with pytest.raises(PoolError, match="closed"):
        env.reset()
    assert server.sandboxes == {}


def test_the_kind_not_asked_for_longest_is_given_up(server: Any, make_env: Any) -> None:
    with SandboxPool(1, max_kinds=2) as pool:
        envs = [make_env(pool=pool, template=name) for name in "abc"]
        for env in envs:
            pool.prefill(env)
        assert pool.stats().warm == 2
    assert server.sandboxes == {}


def test_a_start_that_fails_is_counted_and_does_not_hold_anybody(
    server: Any, make_env: Any, pool: Any
) -> None:
    server.fault(*CREATE, status=400, body='{"code":400,"message":"no"}', times=99)
    assert pool.prefill(make_env(pool=pool)) == 0
    assert pool.stats().failures >= 1


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SandboxPool(0)
