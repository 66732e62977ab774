"""Trajectories one by one as they end, groups, failure policies, and the pause for new weights."""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import EnvError, SandboxLostError
from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.rollout import (
    APIMultiTurnRollout,
    Coverage,
    FailurePolicy,
    RolloutFailedError,
    RolloutResult,
)
from twinkle_agentic.tools import ToolManager

LIMIT_S = 30.0
TOOL: Any = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}


class ByPrompt(API):
    """Sends each prompt to the model that its first word names."""

    bounds_itself = sends_finish_reason = True

    def __init__(self, make: Callable[..., OpenAI]) -> None:
        self.make = make
        self.clients: dict[str, OpenAI] = {}

    async def acomplete(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        model = trajectory["messages"][0]["content"].split()[0]
        client = self.clients.setdefault(model, self.make(model))
        return await client.acomplete(trajectory, sampling_params, **kwargs)

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Game(Env):
    """Ends after one step with reward 1.0, or as `user_data["fault"]` says."""

    opened: ClassVar[Counter[str]] = Counter()
    closed: ClassVar[Counter[str]] = Counter()
    seeds: ClassVar[dict[str, list[Any]]] = {}

    def __init__(self, trajectory: Any) -> None:
        self.name = str(trajectory["id"])
        self.data = dict(trajectory.get("user_data") or {})
        self.opened[self.name] += 1

    def reset(self, trajectory: Any = None) -> StepResult:
        self.seeds.setdefault(self.name, []).append(trajectory["user_data"].get("seed"))
        if self.data.get("fault") == "reset":
            raise EnvError("no such level")
        return StepResult("ready")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        fault = self.data.get("fault")
        if fault == "lost" or (fault == "lost once" and self.opened[self.name] == 1):
            return StepResult.failed(SandboxLostError("the sandbox is lost", retryable=False))
        return StepResult("done", 1.0, True)

    def tools(self) -> list[Any]:
        return [TOOL]

    def close(self) -> None:
        self.closed[self.name] += 1


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    Game.opened, Game.closed, Game.seeds = Counter(), Counter(), {}
    yield
    assert Game.opened == Game.closed


def tasks(*prompts: str, fault: Any = None) -> list[Any]:
    return [
        {
            "id": f"{number}",
            "messages": [{"role": "user", "content": prompt}],
            "user_data": {"fault": fault[number]} if fault else {},
        }
        for number, prompt in enumerate(prompts)
    ]


def rollout_of(api: Any, **options: Any) -> Any:
    if "tool_manager" not in options:
        options.setdefault("env_factory", Game)
    return APIMultiTurnRollout(ByPrompt(api), **options)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


def ids(outs: Any) -> list[str]:
    return [out["id"] for out in outs]


# --- handing out


def test_trajectories_are_handed_out_as_they_end(api: Any) -> None:
    given = tasks("slow:1.5", "always", "always")
    outs = list(rollout_of(api).stream(given))
    assert sorted(ids(outs[:2])) == ["1", "2"]
    assert outs[2]["id"] == "0"
    assert [out["reward"] for out in outs[:2]] == [1.0, 1.0]


def test_a_slow_consumer_delays_further_ones_and_loses_nothing(api: Any) -> None:
    read: list[int] = []

    def inputs() -> Iterator[Any]:
        for number, task in enumerate(tasks(*["always"] * 60)):
            read.append(number)
            yield task

    with rollout_of(api, concurrency=4).stream(inputs(), buffer=3) as stream:
        outs = [next(stream)]
        # Three ended and four that were started before: then no further one starts.
        wait_until(lambda: sum(Game.closed.values()) >= 1 + 3)
        started = sum(Game.opened.values())
        assert started <= 1 + 3 + 4
        assert len(read) <= 2 * (3 + 4)
        outs += list(stream)
    assert sorted(map(int, ids(outs))) == list(range(60))
    assert stream.coverage == Coverage(asked=60, completed=60, scored=60)


def test_more_is_submitted_while_it_runs(api: Any) -> None:
    with rollout_of(api, concurrency=2).stream(hold_open=True) as stream:
        first, second, *rest = tasks(*["always"] * 6)
        stream.submit(first)
        assert next(stream)["id"] == "0"
        stream.submit(second)
        assert next(stream)["id"] == "1"
        for task in rest:
            stream.submit(task)
        stream.finish()
        assert sorted(ids(stream)) == ["2", "3", "4", "5"]
        with pytest.raises(RuntimeError, match="no further trajectories"):
            stream.submit(first)


def test_another_thread_submits_while_one_waits(api: Any) -> None:
    with rollout_of(api).stream(hold_open=True) as stream:

        def submit() -> None:
            for task in tasks("always", "always"):
                stream.submit(task)
            stream.finish()

        threading.Timer(0.1, submit).start()
        assert sorted(ids(stream)) == ["0", "1"]


def test_single_trajectories_are_cancelled(api: Any, stats: Any) -> None:
    given = tasks("hang", "slow:2.01", "always")
    stream = rollout_of(api, concurrency=2).stream(given)
    taker = threading.Thread(target=lambda: taken.extend(stream))
    taken: list[Any] = []
    taker.start()
    wait_until(lambda: stats()["running"].get("slow:2.01", 0) == 1)
    assert stream.cancel(2) is True  # still queued
    assert stream.cancel(0) is True  # would never end
    taker.join(LIMIT_S)
    assert ids(taken) == ["1"]
    assert stream.cancel(1) is False
    assert stream.coverage == Coverage(asked=3, completed=1, scored=1, cancelled=2)
    assert Game.opened == {"0": 1, "1": 1}


def test_leaving_early_closes_all_envs_and_keeps_what_has_ended(api: Any) -> None:
    stream = rollout_of(api).stream(tasks("hang", "always", "hang", "always"))
    with stream:
        assert next(stream)["reward"] == 1.0
        wait_until(lambda: stream.coverage.completed == 2)
    assert [out["reward"] for out in stream] == [1.0]
    assert stream.coverage.cancelled == 2


def test_a_stream_that_is_thrown_away_closes_its_envs(api: Any) -> None:
    def one() -> Any:
        for out in rollout_of(api).stream(tasks("hang", "always")):
            return out

    assert one()["id"] == "1"
    gc.collect()
    wait_until(lambda: Game.closed == {"0": 1, "1": 1})


@pytest.mark.parametrize("at", [0, 3])
def test_inputs_that_raise_end_the_stream(api: Any, at: int) -> None:
    def inputs() -> Iterator[Any]:
        for number, task in enumerate(tasks(*["always"] * 9)):
            if number == at:
                raise OSError("the data set cannot be read")
            yield task

    stream = rollout_of(api, concurrency=2).stream(inputs(), buffer=1)
    with pytest.raises(OSError, match="data set"):
        list(stream)
    assert len(list(stream)) <= 3  # those that had ended


def test_what_is_no_trajectory_is_refused(api: Any) -> None:
    with pytest.raises(TypeError, match="must be a dict"):
        next(rollout_of(api).stream(["Hello"]))
    with pytest.raises(TypeError, match="must be a list"):
        rollout_of(api).stream({"messages": []})
    with pytest.raises(TypeError, match="unknown overrides"):
        rollout_of(api).stream([], temperature=1.0)
    with pytest.raises(ValueError, match="no list"):
        rollout_of(api, tool_manager=[ToolManager()]).stream([])


async def test_a_wait_that_is_cut_loses_nothing(api: Any) -> None:
    async with rollout_of(api).astream(tasks("slow:0.6", "slow:0.6")) as stream:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
        outs = [out async for out in stream]
    assert sorted(ids(outs)) == ["0", "1"]


async def test_many_consumers_of_one_loop_run_beside_each_other(api: Any) -> None:
    rollout = rollout_of(api)

    async def consume(prefix: str) -> list[str]:
        given = [{**task, "id": f"{prefix}{task['id']}"} for task in tasks(*["always"] * 5)]
        return sorted([out["id"] async for out in rollout.astream(given)])

    first, second = await asyncio.gather(consume("a"), consume("b"))
    assert (first, second) == ([f"a{n}" for n in range(5)], [f"b{n}" for n in range(5)])


def test_an_endpoint_that_dies_costs_no_trajectory_its_place(server: str) -> None:
    script = Path(__file__).with_name("scripted_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    policy = RetryPolicy(max_attempts=2, base_delay_s=0.01)
    api = OpenAI("slow:0.2", "key", url, retry=policy)
    rollout = APIMultiTurnRollout(api, env_factory=Game, concurrency=8)
    try:
        with rollout.stream(tasks(*["slow:0.2"] * 40)) as stream:
            outs = [next(stream) for _ in range(8)]
            process.kill()
            outs += list(stream)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()
    assert sorted(map(int, ids(outs))) == list(range(40))
    stops = Counter(out["stop_reason"] for out in outs)
    assert set(stops) == {"stop", "api_error"} and stops["api_error"] >= 16
    assert all(out["reward"] is None for out in outs if out["stop_reason"] == "api_error")
    assert stream.coverage.failures == {"connection": stops["api_error"]}


# Runs in a process of its own, which gets the SIGINT.
_INTERRUPTED = """
import os, sys
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.rollout import APIMultiTurnRollout

class Game(Env):
    def __init__(self, trajectory): os.write(1, b"open\\n")
    def step(self, name, arguments): return StepResult()
    def close(self): os.write(1, b"close\\n")

rollout = APIMultiTurnRollout(OpenAI("hang", "key", sys.argv[1]), env_factory=Game)
given = [{"messages": [{"role": "user", "content": "x"}]} for _ in range(3)]
try:
    next(rollout.stream(given))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_closes_the_envs_of_a_stream(server: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, f"{server}/v1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        assert [process.stdout.readline() for _ in range(3)] == ["open\n"] * 3
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert rest.split() == ["close"] * 3 + ["interrupted"]


# --- groups and failures


def test_a_group_shares_its_seed_and_says_which_sample_it_is(api: Any) -> None:
    given = tasks("always", "always")
    given[1]["user_data"] = {"seed": 7}
    given[1]["group_id"] = "mine"
    outs = rollout_of(api, group_size=3)(given)
    assert [(out["group_id"], out["sample"]) for out in outs] == [
        *[(0, 0), (0, 1), (0, 2)],
        *[("mine", 0), ("mine", 1), ("mine", 2)],
    ]
    assert Game.seeds["1"] == [7, 7, 7]
    assert len(set(Game.seeds["0"])) == 1 and isinstance(Game.seeds["0"][0], int)
    assert {out["user_data"]["seed"] for out in outs[:3]} == set(Game.seeds["0"])
    assert "seed" not in given[0]["user_data"]
    assert outs.coverage == Coverage(asked=6, completed=6, scored=6)
    assert pickle.loads(pickle.dumps(outs)).coverage == outs.coverage


def test_each_call_has_seeds_of_its_own(api: Any) -> None:
    rollout = rollout_of(api, group_size=2)
    for _ in range(4):
        rollout(tasks("always"))
    assert len(set(Game.seeds["0"])) == 4


def test_failures_are_kept_counted_and_said(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = tasks("always", "status:400", "always", fault=[None, None, "lost"])
    outs = rollout_of(api)(given)
    assert isinstance(outs, RolloutResult) and ids(outs) == ["0", "1", "2"]
    assert [out["reward"] for out in outs] == [1.0, None, None]
    assert (outs.coverage.completed, outs.coverage.scored) == (1, 1)
    assert outs.coverage.failures == {"refused": 1, "sandbox_lost": 1}
    said = "1 of 3 trajectories completed, 1 scored; failed: 1 refused, 1 sandbox_lost"
    assert said in caplog.text


def test_a_group_with_a_failure_is_left_out(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = FailurePolicy(by_kind={"sandbox_lost": "drop_group"})
    given = tasks("always", "always", "status:400", fault=[None, "lost", None])
    told: list[Any] = []
    outs = rollout_of(api, group_size=2, failure_policy=policy, on_done=told.append)(given)
    assert ids(outs) == ["0", "0", "2", "2"]  # another kind of failure is kept
    assert (outs.coverage.asked, outs.coverage.dropped) == (6, 2)
    assert len(told) == 6  # they were played
    assert "2 left out with their group" in caplog.text


def test_a_group_with_too_few_scores_is_left_out(api: Any) -> None:
    class Third(Game):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            if self.data["fault"] == "some" and self.opened[self.name] > 0:
                self.opened[self.name] += 0
            return super().step(tool_name, arguments)

    def factory(trajectory: Any) -> Env:
        fault = trajectory["user_data"]["fault"]
        if fault == "some" and trajectory["sample"] == 0:
            trajectory = {**trajectory, "user_data": {"fault": "lost"}}
        return Third(trajectory)

    given = tasks("always", "always", "always", fault=[None, "some", "lost"])
    for least, kept in ((1, ["0", "1"]), (2, ["0", "1"]), (3, ["0"])):
        policy = FailurePolicy(min_group=least)
        rollout = rollout_of(api, group_size=3, failure_policy=policy, env_factory=factory)
        outs = rollout(given)
        assert ids(outs) == [name for name in kept for _ in range(3)]
        assert outs.coverage.dropped == 9 - 3 * len(kept)


def test_a_stream_holds_the_members_of_a_group_until_it_is_whole(api: Any) -> None:
    policy = FailurePolicy(default="drop_group")
    prompts = ["always"] * 12
    faults = ["lost" if n % 3 == 0 else None for n in range(12)]
    rollout = rollout_of(api, group_size=4, failure_policy=policy, concurrency=3)
    with rollout.stream(tasks(*prompts, fault=faults), buffer=1) as stream:
        outs = list(stream)
    groups = [tuple(ids(outs[n : n + 4])) for n in range(0, len(outs), 4)]
    assert sorted(groups, key=lambda group: int(group[0])) == [
        (str(n),) * 4 for n in range(12) if n % 3
    ]
    assert (stream.coverage.asked, stream.coverage.dropped) == (48, 16)


def test_a_group_whose_member_is_cancelled_is_handed_out_without_it(api: Any, stats: Any) -> None:
    policy = FailurePolicy(min_group=1)
    rollout = rollout_of(api, group_size=2, failure_policy=policy)
    with rollout.stream(tasks("hang", "always"), hold_open=True) as stream:
        assert ids([next(stream), next(stream)]) == ["1", "1"]
        assert stream.cancel(0)
        stream.finish()
        assert list(stream) == []
    assert stream.coverage == Coverage(asked=4, completed=2, scored=2, cancelled=2)


def test_a_failure_may_end_the_rollout(api: Any) -> None:
    policy = FailurePolicy(by_kind={"refused": "fail"})
    rollout = rollout_of(api, failure_policy=policy)
    with pytest.raises(RolloutFailedError, match=r"failed with 'refused': .*400") as caught:
        rollout(tasks("hang", "status:400", "hang"))
    failed: Any = caught.value.trajectory
    assert failed["id"] == "1"
    assert pickle.loads(pickle.dumps(caught.value)).trajectory == failed
    stream = rollout.stream(tasks("always", "always", "hang"), hold_open=True)
    assert ids([next(stream)]) <= ["1"]
    wait_until(lambda: stream.coverage.completed == 2)
    stream.submit(tasks("status:400")[0])
    with pytest.raises(RolloutFailedError):
        wait_until(lambda: stream.coverage.failures["refused"] == 1)
        list(stream)
    assert len(list(stream)) == 1  # it had ended before


def test_a_failure_that_is_not_marked_retryable_may_be_tried_again(api: Any) -> None:
    given = tasks("always", fault=["lost once"])
    (once,) = rollout_of(api, max_attempts=2)(given)
    assert (once["reward"], once["attempts"]) == (None, 1)
    Game.opened.clear()
    Game.closed.clear()
    retry = RetryPolicy(max_attempts=2, base_delay_s=0.001)
    policy = FailurePolicy(by_kind={"sandbox_lost": "retry"})
    (again,) = rollout_of(api, retry=retry, failure_policy=policy)(given)
    assert (again["reward"], again["attempts"]) == (1.0, 2)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ({"default": "drop"}, {}, "must be one of 'keep', 'retry', 'drop_group', 'fail'"),
        ({"by_kind": {"timeuot": "retry"}}, {}, r"by_kind has \['timeuot'\]"),
        ({"min_group": 0}, {}, "min_group must be a whole number"),
        ({"min_group": 3}, {"group_size": 2}, "would leave out every group"),
        ({"default": "retry"}, {}, "set max_attempts to 2 or more"),
        ({}, {"group_size": 0}, "group_size must be a whole number"),
    ],
)
def test_policies_that_cannot_work_are_refused(
    api: Any, policy: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_of(api, failure_policy=FailurePolicy(**policy), **options)


def test_a_group_size_of_a_call_is_checked(api: Any) -> None:
    rollout = rollout_of(api)
    with pytest.raises(ValueError, match="group_size must be a whole number"):
        rollout(tasks("always"), group_size=0)
    assert len(rollout(tasks("always"), group_size=2)) == 2
    assert len(list(rollout.stream(tasks("always"), group_size=3))) == 3


def test_samples_of_a_group_cannot_share_an_env(api: Any) -> None:
    from twinkle_agentic.envs.env_tool import EnvTool

    class Plain(Env):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            return StepResult()

    manager = ToolManager(EnvTool.from_env(Plain()))
    with pytest.raises(ValueError, match="would act on the same env"):
        rollout_of(api, tool_manager=manager, group_size=2)(tasks("always"))
    with pytest.raises(ValueError, match="would act on the same env"):
        rollout_of(api, tool_manager=manager).stream([])


FAULTS = ["always", "status:500", "status:400", "drop", "truncated", "hangs_up", "context", "html"]


@pytest.mark.parametrize("action", ["keep", "retry", "drop_group"])
def test_every_trajectory_is_accounted_for_under_every_policy(api: Any, action: Any) -> None:
    prompts = [FAULTS[n % len(FAULTS)] for n in range(50)]
    faults = [[None, "lost", "reset"][n % 3] for n in range(50)]
    retry = RetryPolicy(max_attempts=2, base_delay_s=0.001)
    rollout = rollout_of(
        api,
        group_size=4,
        failure_policy=FailurePolicy(default=action),
        retry=retry,
        concurrency=32,
        deadline_s=LIMIT_S,
        max_turns=2,
    )
    with rollout.stream(tasks(*prompts, fault=faults), buffer=8) as stream:
        outs = list(stream)
    coverage = stream.coverage
    assert coverage.asked == 200
    assert coverage.completed + sum(coverage.failures.values()) == 200
    assert len(outs) + coverage.dropped == 200
    handed_out = Counter((out["id"], out["sample"]) for out in outs)
    assert set(handed_out.values()) == {1}
    fine = [n for n in range(50) if prompts[n] == "always" and faults[n] is None]
    assert {out["id"] for out in outs if out["reward"] == 1.0} >= {str(n) for n in fine}
    assert all((out["reward"] is None) == (out["error"] is not None) for out in outs)
    if action == "drop_group":
        assert all(out["reward"] is not None for out in outs)
    if action == "retry":
        assert all(out["attempts"] == 2 for out in outs if out["stop_reason"].endswith("_error"))


# --- pause


def test_a_pause_lets_running_requests_finish_and_starts_none(api: Any, stats: Any) -> None:
    rollout = rollout_of(api, concurrency=2)
    rollout.policy_version = 1
    with rollout.stream(tasks(*["slow:0.41"] * 6)) as stream:
        taken: list[Any] = []
        taker = threading.Thread(target=lambda: taken.extend(stream))
        taker.start()
        wait_until(lambda: stats()["running"].get("slow:0.41", 0) == 2)
        assert rollout.pause() == 0
        assert stats()["running"]["slow:0.41"] == 0
        asked = sum(n for key, n in stats()["counts"].items() if key.startswith("slow:0.41"))
        wait_until(lambda: sum(Game.opened.values()) == 4)  # the next ones wait to ask
        assert asked == 2
        rollout.resume(policy_version=2)
        taker.join(LIMIT_S)
    assert Counter(v for out in taken for v in out["policy_versions"]) == {1: 2, 2: 4}


def test_a_pause_may_abort_requests_which_are_sent_again(api: Any, stats: Any) -> None:
    rollout = rollout_of(api, deadline_s=LIMIT_S)
    rollout.policy_version = "a"
    with rollout.stream(tasks(*["slow:1.02"] * 3)) as stream:
        taken: list[Any] = []
        taker = threading.Thread(target=lambda: taken.extend(stream))
        taker.start()
        wait_until(lambda: stats()["running"].get("slow:1.02", 0) == 3)
        assert rollout.pause("abort") == 3
        wait_until(lambda: stats()["running"]["slow:1.02"] == 0)
        rollout.resume("b")
        taker.join(LIMIT_S)
    assert [out["policy_versions"] for out in taken] == [["b"]] * 3
    assert [out["stop_reason"] for out in taken] == ["stop"] * 3


def test_requests_that_do_not_finish_in_time_are_aborted(api: Any, stats: Any) -> None:
    before = stats()["running"].get("hang", 0)
    rollout = rollout_of(api)
    with rollout.stream(tasks("hang", "hang")) as stream:
        taker = threading.Thread(target=lambda: list(stream))
        taker.start()
        wait_until(lambda: stats()["running"].get("hang", 0) == before + 2)
        assert rollout.pause(timeout_s=0.2) == 2
        stream.cancel(0)
        stream.cancel(1)
        taker.join(LIMIT_S)
    assert not taker.is_alive()


def test_a_pause_does_not_count_against_the_deadline(api: Any) -> None:
    rollout = rollout_of(api, deadline_s=0.5)
    rollout.pause()
    threading.Timer(0.8, rollout.resume).start()
    (out,) = rollout(tasks("always"))
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)
    assert out["timing"]["paused"] > 0.3
    assert out["turn_timings"][0]["paused"] == out["timing"]["paused"]
    assert out["timing"]["model"] < out["timing"]["total"] - out["timing"]["paused"]


def test_a_pause_without_end_ends_the_trajectories_that_wait(api: Any) -> None:
    rollout = rollout_of(api)
    rollout.pause(max_pause_s=0.2)
    (out,) = rollout(tasks("always"))
    assert (out["stop_reason"], out["error_kind"]) == ("api_error", "timeout")
    assert "paused for more than 0.2 s" in out["error"]


async def test_a_pause_on_the_loop_of_the_rollout_is_refused(api: Any, stats: Any) -> None:
    rollout = rollout_of(api)
    async with rollout.astream(tasks("slow:1.53")) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(wait_until, lambda: stats()["running"].get("slow:1.53") == 1)
        with pytest.raises(RuntimeError, match="await apause"):
            rollout.pause()
        assert await rollout.apause() == 0
        rollout.resume()
        out = await waiting
    assert out["stop_reason"] == "stop"


@pytest.mark.parametrize(
    "kwargs", [{"on_pause": "stop"}, {"timeout_s": 0}, {"max_pause_s": float("inf")}]
)
def test_pauses_that_cannot_work_are_refused(api: Any, kwargs: dict[str, Any]) -> None:
    rollout = rollout_of(api)
    with pytest.raises(ValueError, match="must be"):
        rollout.pause(**kwargs)
    (out,) = rollout(tasks("always"))
    assert out["reward"] == 1.0


def test_each_turn_says_how_long_it_took(api: Any) -> None:
    (out,) = rollout_of(api, tool_manager=ToolManager())(tasks("tools:2"))
    assert out["turns"] == len(out["turn_timings"]) == 3
    assert all(set(turn) == {"model", "tools"} for turn in out["turn_timings"])
    assert sum(turn["model"] for turn in out["turn_timings"]) == pytest.approx(
        out["timing"]["model"]
    )
    assert "policy_versions" not in out and "paused" not in out["timing"]
