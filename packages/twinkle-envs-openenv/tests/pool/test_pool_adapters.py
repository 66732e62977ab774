from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import EnvError, ErrorKind, PoolError
from twinkle_agentic.envs.openenv.pool import EnvPool, EnvPoolAdapter
from twinkle_agentic.tools.tool_manager import ToolManager


def _name(tool: Any) -> str:
    return tool["function"]["name"]


def test_adapters_wrap_the_first_slots(make_pool: Callable[..., EnvPool]) -> None:
    envs = make_pool(4).get_adapters(3)
    assert all(isinstance(env, Env) for env in envs)
    assert [env.slot for env in envs] == [0, 1, 2]
    for number, env in enumerate(envs):
        env.reset({"user_data": {"number": number}})
    assert [env.step("echo", {"text": str(n)}).observation for n, env in enumerate(envs)] == [
        "0",
        "1",
        "2",
    ]


def test_adapters_may_be_asked_for_again(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(2)
    pool.get_adapters(2)[1].reset()
    assert pool.get_adapters(2)[1].step("add").observation == "step 1"


def test_more_adapters_than_slots_is_an_error(make_pool: Callable[..., EnvPool]) -> None:
    with pytest.raises(ValueError, match="5 adapters were asked for, but the pool has 4 slots"):
        make_pool(4).get_adapters(5)


def test_step_error_ends_the_episode_and_keeps_what_was_earned(
    make_pool: Callable[..., EnvPool],
) -> None:
    (env,) = make_pool(2).get_adapters(1)
    env.reset()
    env.step("add", {"reward": 0.75})
    result = env.step("fail", {"message": "boom"})
    assert result.done
    assert "boom" in result.info["error"]
    assert result.info["episode_reward"] == 0.75
    assert env.episode_reward == 0.75
    assert "boom" in env.step("add").info["error"]
    env.reset()
    assert env.episode_reward == 0.0
    assert env.step("add").error is None


def test_arguments_that_cannot_travel_end_the_step_not_the_rollout(
    make_pool: Callable[..., EnvPool],
) -> None:
    (env,) = make_pool(2).get_adapters(1)
    env.reset()
    result = env.step("echo", {"text": lambda: None})
    assert result.done
    assert "cannot be sent" in result.info["error"]


def test_close_of_an_adapter_leaves_the_environment(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(2)
    (env,) = pool.get_adapters(1)
    env.reset()
    env.step("add")
    env.close()
    assert env.step("add").observation == "step 2"


def test_tools_are_those_of_the_last_reset(make_pool: Callable[..., EnvPool]) -> None:
    (env,) = make_pool(2).get_adapters(1)
    assert _name(env.tools()[0]) == "before"
    env.reset({"user_data": {"tool": "after"}})
    assert _name(env.tools()[0]) == "after"
    assert _name(EnvTool.from_env(env)[0].tool_info()) == "after"


def test_evaluate_passes_through(make_pool: Callable[..., EnvPool]) -> None:
    (env,) = make_pool(2).get_adapters(1)
    env.reset()
    assert env.evaluate([{"messages": []}], bonus=4) == [4.0]


def test_env_tools_and_tool_manager_take_adapters(make_pool: Callable[..., EnvPool]) -> None:
    (env,) = make_pool(2).get_adapters(1)
    env.reset({"user_data": {"tool": "add"}})
    tools = EnvTool.from_env(env)
    manager = ToolManager(tools)
    call: Any = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert manager(call) == "step 1"
    assert tools[0].episode_reward == 1.0


def test_lease_hands_out_each_slot_once(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(3)
    envs = [pool.lease() for _ in range(3)]
    assert sorted(env.slot for env in envs if env.slot is not None) == [0, 1, 2]
    assert pool.lease().slot is None


def test_leases_spread_over_the_workers(cluster: Any) -> None:
    with EnvPool(4, env_factory="pool_test_envs:Lab", num_workers=2) as pool:
        envs = [pool.lease(), pool.lease()]
        assert {env.slot for env in envs} == {0, 2}


def test_closed_lease_gives_its_slot_back(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    with pool.lease() as env:
        env.reset()
        assert env.step("add").observation == "step 1"
    assert env.slot is None
    with pool.lease() as other:
        other.reset()
        assert other.step("add").observation == "step 1"
        env.close()  # closed again: the slot belongs to somebody else now
        assert pool.lease().slot is None
        assert "given back" in env.step("add").info["error"]
        with pytest.raises(PoolError, match="given back"):
            env.reset()


def test_reset_of_a_lease_waits_for_a_slot(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    first, second = pool.lease(), pool.lease()
    first.reset()
    with ThreadPoolExecutor(1) as threads:
        reset = threads.submit(second.reset)
        while pool.num_waiting < 1:
            assert not reset.done()
        first.close()
        assert reset.result(30).observation == "ready []"
    assert second.step("add").observation == "step 1"


def test_reset_of_a_lease_gives_up_at_its_limit(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    with pool.lease(), pool.lease(timeout_s=0.1) as second:
        with pytest.raises(PoolError, match=r"within 0\.1 s: 1 of 1 are leased") as caught:
            second.reset()
        assert caught.value.kind is ErrorKind.CAPACITY
        assert caught.value.retryable
        assert pool.num_waiting == 0


async def test_async_lease_waits_without_blocking_the_loop(
    make_pool: Callable[..., EnvPool],
) -> None:
    pool = make_pool(2)

    async def episode(number: int) -> str:
        async with pool.lease() as env:
            await env.areset({"user_data": {"number": number}})
            await env.astep("add", {})
            return (await env.astep("echo", {"text": str(number)})).observation

    assert await asyncio.gather(*map(episode, range(20))) == [str(n) for n in range(20)]
    assert pool.num_free == 2


async def test_alease_holds_a_slot_on_return(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    first = await pool.alease()
    assert first.slot == 0
    waiting = asyncio.create_task(pool.alease())
    await asyncio.sleep(0)
    await first.aclose()
    assert (await waiting).slot == 0
    with pytest.raises(PoolError, match="within"):
        await pool.alease(timeout_s=0.05)


async def test_cancelled_waiter_leaves_the_queue(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    first = pool.lease()
    waiting = asyncio.create_task(pool.alease())
    await asyncio.sleep(0.01)
    assert pool.num_waiting == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_waiting == 0
    first.close()
    assert pool.lease().slot == 0


async def test_slot_that_meets_a_cancelled_waiter_is_not_lost(
    make_pool: Callable[..., EnvPool],
) -> None:
    pool = make_pool(1)
    first = pool.lease()
    waiting = asyncio.create_task(pool.alease())
    await asyncio.sleep(0.01)
    first.close()  # the slot is on its way to the waiter
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_free == 1


def test_waiters_are_served_in_order(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    first = pool.lease()
    order: list[int] = []

    def wait(number: int) -> None:
        with pool.lease() as env:
            env.reset()
            order.append(number)

    with ThreadPoolExecutor(4) as threads:
        waiting: list[Any] = []
        for number in range(4):
            waiting.append(threads.submit(wait, number))
            while pool.num_waiting < number + 1:
                pass
        first.close()
        for each in waiting:
            each.result(30)
    assert order == [0, 1, 2, 3]


def test_forgotten_lease_gives_its_slot_back(
    make_pool: Callable[..., EnvPool], eventually: Callable[..., None]
) -> None:
    pool = make_pool(1)
    env = pool.lease()
    assert pool.num_free == 0
    del env
    gc.collect()
    eventually(lambda: pool.num_free == 1, "the slot is back")


def test_adapters_and_leases_do_not_share_slots(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(4)
    pool.get_adapters(2)
    leased = [pool.lease() for _ in range(2)]
    assert {env.slot for env in leased} == {2, 3}
    with pytest.raises(PoolError, match=r"\[2, 3\] are leased"):
        pool.get_adapters(4)
    with (
        pool.lease(timeout_s=0.1) as fifth,
        pytest.raises(PoolError, match="2 of 4 are leased, 2 are given out by get_adapters"),
    ):
        fifth.reset()
    for env in leased:
        env.close()
    pool.get_adapters(4)
    with pool.lease() as env, pytest.raises(PoolError, match="given out by get_adapters"):
        env.reset()


def test_close_of_the_pool_wakes_everybody_who_waits(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    first, second = pool.lease(), pool.lease()
    assert first.slot == 0
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.reset)
        while pool.num_waiting < 1:
            assert not waiting.done()
        pool.close()
        with pytest.raises(PoolError, match="closed"):
            waiting.result(30)


def test_lease_survives_a_failing_reset(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(1)
    with pool.lease() as env:
        with pytest.raises(EnvError, match="refused"):
            env.reset({"user_data": {"refuse": True}})
        assert env.reset().observation == "ready []"
    assert pool.num_free == 1


async def test_cancelled_step_of_a_lease_does_not_disturb_the_next(
    make_pool: Callable[..., EnvPool], gate: Any
) -> None:
    pool = make_pool(1)
    first = pool.lease()
    await first.areset()
    step = asyncio.create_task(first.astep("wait", {"gate": gate.path}))
    await asyncio.to_thread(gate.await_waiting, 1)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await first.aclose()
    async with pool.lease() as second:
        reset = asyncio.create_task(second.areset())
        await asyncio.to_thread(gate.open)
        assert (await reset).observation == "ready []"
        assert (await second.astep("add", {})).observation == "step 1"


def test_adapter_is_importable_where_the_document_says() -> None:
    from twinkle_agentic.envs import openenv

    assert openenv.EnvPoolAdapter is EnvPoolAdapter
    assert openenv.EnvPool is EnvPool
