from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.errors import PoolError
from twinkle_agentic.envs.openenv.pool import EnvPool
from twinkle_agentic.envs.openenv.pool._start import cut_into_shards

NOTHING: list[dict[str, Any]] = [{}]  # arguments of one step


@dataclass
class Mesh:
    world_size: int


def test_arguments_are_those_of_the_document() -> None:
    assert list(inspect.signature(EnvPool).parameters)[:3] == [
        "pool_size",
        "device_mesh",
        "env_kwargs",
    ]
    assert inspect.signature(EnvPool).parameters["pool_size"].default == 32


def test_no_workers_by_default(make_pool: Callable[..., EnvPool]) -> None:
    pool = EnvPool(3, env_factory="pool_test_envs:Lab")
    try:
        assert pool.num_workers == 0
        assert [(w.start, w.end) for w in pool.stats()] == [(0, 3)]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("pool_size", "world_size", "shards"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (5, 4, [(0, 2), (2, 4), (4, 5)]),  # the fourth worker would hold nothing
        (2, 4, [(0, 1), (1, 2)]),
        (64, 5, [(0, 13), (13, 26), (26, 39), (39, 52), (52, 64)]),
        (3, 0, [(0, 3)]),
    ],
)
def test_shards_are_equal_but_for_the_last(
    pool_size: int, world_size: int, shards: list[tuple[int, int]]
) -> None:
    assert [(s.start, s.stop) for s in cut_into_shards(pool_size, world_size)] == shards


def test_mesh_gives_the_workers(cluster: Any) -> None:
    with EnvPool(5, Mesh(2), env_factory="pool_test_envs:Lab") as pool:
        assert [(w.start, w.end) for w in pool.stats()] == [(0, 3), (3, 5)]
        assert pool.num_workers == 2
        assert all(r.error is None for r in pool.reset_batch(range(5)))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"pool_size": 0}, "pool_size must be a whole number of at least 1, found 0"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 0 or None, found -1"),
        (
            {"device_mesh": Mesh(0)},
            "world_size of device_mesh must be a whole number .*, found 0",
        ),
        ({"device_mesh": Mesh(2), "num_workers": 3}, "num_workers=3 disagrees"),
        ({"step_timeout_s": 0}, "step_timeout_s must be above 0, found 0"),
        ({"reset_timeout_s": -1.0}, "reset_timeout_s must be above 0, found -1.0"),
        ({"lease_timeout_s": float("nan")}, "lease_timeout_s must be above 0, found nan"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        EnvPool(**kwargs)


def test_wrong_env_kwargs_show_at_construction(num_workers: int) -> None:
    with pytest.raises(PoolError, match=r"worker 0 .* TypeError: .*unexpected keyword"):
        EnvPool(
            2, env_factory="pool_test_envs:Lab", env_kwargs={"nope": 1}, num_workers=num_workers
        )


def test_environment_that_cannot_be_made_shows_at_construction(num_workers: int) -> None:
    with pytest.raises(PoolError, match="RuntimeError: no such game"):
        EnvPool(
            2,
            env_factory="pool_test_envs:Lab",
            env_kwargs={"fail": "no such game"},
            num_workers=min(1, num_workers),
        )


def test_unknown_module_shows_at_construction(num_workers: int) -> None:
    with pytest.raises(PoolError, match="cannot import module 'no_such_module'"):
        EnvPool(2, env_factory="no_such_module:Env", num_workers=min(1, num_workers))


def test_unknown_attribute_shows_at_construction(num_workers: int) -> None:
    with pytest.raises(PoolError, match="no attribute 'Missing'"):
        EnvPool(2, env_factory="pool_test_envs:Missing", num_workers=min(1, num_workers))


def test_factory_without_attribute_shows_at_construction(num_workers: int) -> None:
    with pytest.raises(PoolError, match="'pool_test_envs' names no class"):
        EnvPool(2, env_factory="pool_test_envs", num_workers=min(1, num_workers))


def test_factory_that_makes_no_env_shows_at_construction(num_workers: int) -> None:
    with pytest.raises(PoolError, match="must give an Env"):
        EnvPool(2, env_factory="pool_test_envs:make_nothing", num_workers=min(1, num_workers))


def test_factory_may_be_a_function_or_a_class(num_workers: int) -> None:
    pool_test_envs: Any = importlib.import_module("pool_test_envs")

    for factory in (pool_test_envs.Lab, pool_test_envs.make_lab, "pool_test_envs:make_lab"):
        with EnvPool(2, env_factory=factory, num_workers=min(1, num_workers)) as pool:
            assert pool.reset(1).observation == "ready []"


@pytest.mark.parametrize("how", ["class", "text", "factory", "subclass"])
def test_network_clients_are_refused_with_the_reason(num_workers: int, how: str) -> None:
    pool_test_envs: Any = importlib.import_module("pool_test_envs")

    class MyClient(pool_test_envs.OpenEnvClient):
        pass

    factories: dict[str, Any] = {
        "class": pool_test_envs.OpenEnvClient,
        "text": "twinkle_agentic.envs.openenv.client:OpenEnvClient",
        "factory": pool_test_envs.make_client,
        "subclass": MyClient,
    }
    with pytest.raises(
        (TypeError, PoolError), match=r"OpenEnvClient .*the session lives on the server"
    ):
        EnvPool(2, env_factory=factories[how], num_workers=min(1, num_workers))


@pytest.mark.parametrize(
    "env_cls",
    [
        "openenv.core.generic_client:GenericEnvClient",
        "twinkle_agentic.envs.openenv.client:OpenEnvClient",
    ],
)
def test_network_client_in_the_place_of_an_environment_is_refused(env_cls: str) -> None:
    kwargs = {"env_cls": env_cls, "env_kwargs": {"base_url": "http://127.0.0.1:1"}}
    with pytest.raises(PoolError, match=r"the client of a server: the session lives there"):
        EnvPool(2, env_kwargs=kwargs)


def test_agent_env_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=r"AgentEnv .*scheduled by the AgentENV server"):
        EnvPool(2, env_factory="twinkle_agentic.envs.agentenv:AgentEnv")


def test_class_that_only_the_driver_can_import_is_named(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver_only_env.py").write_text(
        "from pool_test_envs import Lab\nclass Mine(Lab):\n    pass\ndef mapper(*_): ...\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    driver_only_env: Any = importlib.import_module("driver_only_env")

    try:
        wrong: list[dict[str, Any]] = [
            {"env_factory": driver_only_env.Mine},
            {"env_factory": "pool_test_envs:Lab", "env_kwargs": {"log": driver_only_env.mapper}},
        ]
        for arguments in wrong:
            with pytest.raises(PoolError, match="cannot import module 'driver_only_env'"):
                EnvPool(2, num_workers=1, **arguments)
    finally:
        del sys.modules["driver_only_env"]


def test_class_defined_in_a_test_function_travels_by_value(cluster: Any) -> None:
    from twinkle_agentic.envs.base import Env, StepResult

    class Local(Env):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            return StepResult(tool_name)

    Local.__module__ = "__main__"
    with EnvPool(2, env_factory=Local, num_workers=1) as pool:
        pool.reset(0)
        assert pool.step(0, "hello").observation == "hello"


def test_env_kwargs_that_do_not_pickle_are_refused(cluster: Any) -> None:
    import threading

    with pytest.raises(TypeError, match="cannot be sent to the workers"):
        EnvPool(
            2,
            env_factory="pool_test_envs:Lab",
            env_kwargs={"log": threading.Lock()},
            num_workers=1,
        )


def test_workers_that_do_not_fit_are_an_error_with_the_figures(cluster: Any) -> None:
    with pytest.raises(
        PoolError, match=r"not ready within 1\.5 s; the cluster has .* asks for {'num_cpus': 500}"
    ):
        EnvPool(
            2,
            env_factory="pool_test_envs:Lab",
            num_workers=2,
            worker_options={"num_cpus": 500},
            start_timeout_s=1.5,
        )


def test_worker_options_reach_the_actors(cluster: Any) -> None:
    options = {"runtime_env": {"env_vars": {"POOL_TEST_FLAG": "up"}}, "num_cpus": 0.01}
    with EnvPool(
        1, env_factory="pool_test_envs:Lab", num_workers=1, worker_options=options
    ) as pool:
        pool.reset(0)
        assert pool.step(0, "environ", {"name": "POOL_TEST_FLAG"}).observation == "up"


def test_unknown_worker_option_is_an_error(cluster: Any) -> None:
    with pytest.raises(PoolError, match="Ray refused the workers"):
        EnvPool(1, env_factory="pool_test_envs:Lab", num_workers=1, worker_options={"no_such": 1})


def test_eight_workers_fit_on_few_cores(cluster: Any) -> None:
    with EnvPool(16, env_factory="pool_test_envs:Lab", num_workers=8) as pool:
        pool.reset_batch(range(16))
        pids = pool.step_batch(range(16), ["pid"] * 16, NOTHING * 16)
        assert len({r.observation for r in pids}) == 8


def test_ray_runs_on_after_close_when_the_user_started_it(cluster: Any) -> None:
    import ray

    EnvPool(1, env_factory="pool_test_envs:Lab", num_workers=1).close()
    assert ray.is_initialized()
