# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""`OpenEnv`: environments in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

if importlib.util.find_spec("openenv") is None:
    pytest.skip(
        "openenv is not installed: it comes with the embedded extra", allow_module_level=True
    )

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import EnvError, EnvTimeoutError
from twinkle_agentic.envs.openenv import ActionRefusedError, OpenEnv
from twinkle_agentic.tools.tool_manager import ToolManager

pytestmark = pytest.mark.timeout(120)
SERVERS = Path(__file__).parent / "servers"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SERVERS))
    import lab_env  # pyright: ignore[reportMissingImports]

    yield lab_env


@pytest.fixture
def env(lab: ModuleType) -> Iterator[OpenEnv]:
    with OpenEnv(env_cls=lab.LabEnvironment) as made:
        yield made


def say(value: str, number: float = 0.0) -> dict[str, Any]:
    return {"command": "say", "value": value, "number": number}


class Seen(Observation):
    """Has a field that is called as the part of a result it is not."""

    observation: list[float] = Field(default_factory=list[float])
    text: str = ""


class Move(Action):
    by: int = 1


class Counter(Environment[Move, Seen, State]):
    """Counts; `reset` takes nothing."""

    closed = 0

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = start
        self.value = start

    def reset(self) -> Seen:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.value = self.start
        return Seen(text=f"at {self.value}", reward=0.0)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        self.value += action.by
        return Seen(text=f"at {self.value}", reward=1.0, observation=[0.5] * 5000)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        type(self).closed += 1


def test_the_documents_flow() -> None:
    env = OpenEnv(env_cls=Counter, env_kwargs={"start": 5})
    assert env.reset().observation == "at 5"
    result = env.step("play", {"by": 2})
    assert (result.observation, result.reward, result.done) == ("at 7", 1.0, False)
    assert result.info["episode_reward"] == env.episode_reward == 1.0
    assert env.last_result.text == "at 7"
    env.close()
    env.close()
    assert env.step("play", {}).done
    with pytest.raises(EnvError, match="closed"):
        env.reset()
    assert Counter.closed == 1


def test_observation_with_a_field_called_observation_is_still_one() -> None:
    with OpenEnv(env_cls=Counter) as env:
        env.reset()
        assert env.step("any", {}).observation == "at 1"
        assert env.step("any", {}).reward == 1.0


def test_package_is_found_by_type(word_game_package: str) -> None:
    with OpenEnv(word_game_package) as env:
        result = env.reset({"user_data": {"seed": 3, "episode_id": "g1", "word_length": 4}})
        assert "4 letters" in result.observation
        assert env.env.state.episode_id == "g1"
        labelled = {"user_data": {"answer": "crane", "word_length": 4}}
        with pytest.raises(EnvError, match=r"no setting 'answer'.*pass reset_keys=\[\.\.\.\]"):
            env.reset(labelled)
    with OpenEnv(word_game_package, reset_keys=["word_length"]) as env:
        env.reset(labelled)
        assert env.env.state.word_length == 4
        step = env.step("any", {"guess": "crane"})
        assert step.error is None
        assert type(env.last_result).__name__ == "WordGameObservation"


def test_package_without_a_server_is_told_from_one_that_is_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'json' .* has no 'json.server'.* env_cls="):
        OpenEnv(env_name="json")


def test_tools_are_empty_by_default_so_one_generic_tool_is_made(env: OpenEnv) -> None:
    assert env.tools() == []
    env.reset()
    (tool,) = EnvTool.from_env(env)
    assert tool.tool_info()["function"]["name"] == "env_action"
    call = {"function": {"name": "env_action", "arguments": say("through the manager", 2.0)}}
    assert ToolManager([tool])(call) == "through the manager"
    assert tool.episode_reward == 2.0


def test_subclass_may_name_the_tools(lab: ModuleType) -> None:
    class Named(OpenEnv):
        def tools(self) -> list[Any]:
            return [{"type": "function", "function": {"name": "speak"}}]

    with Named(env_cls=lab.LabEnvironment) as env:
        env.reset()
        assert env.step("speak", say("named")).observation == "named"
        assert "speak" in env.step("other", say("named")).observation


def test_auto_tools_have_the_fields_of_the_action(lab: ModuleType) -> None:
    with OpenEnv(env_cls=lab.LabEnvironment, tools="auto") as env:
        (tool,) = env.tools()
        assert set(tool["function"]["parameters"]["properties"]) == {"command", "value", "number"}
        env.reset()
        result = env.step("fly", {})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert "env_action" in result.observation


def test_auto_tools_of_an_mcp_environment_are_its_tools(
    lab: ModuleType,
) -> None:
    with OpenEnv(env_cls="tool_env:ToolEnvironment", tools="auto") as env:
        assert [tool["function"]["name"] for tool in env.tools()] == ["repeat", "divide"]
        env.reset()
        result = env.step("repeat", {"message": "ab", "times": 2})
        assert (result.observation, result.info["reward_missing"]) == ("abab", True)
        failed = env.step("divide", {"a": 1, "b": 0})
        assert (failed.done, failed.info["error_kind"]) == (False, "tool")
        unknown = env.step("multiply", {})
        assert "repeat, divide" in unknown.observation


def test_given_tools_are_shown_and_checked(lab: ModuleType) -> None:
    tool: Any = {"type": "function", "function": {"name": "speak", "parameters": {}}}
    mapper = lambda name, arguments: say(f"{name} {arguments['words']}")  # noqa: E731
    with OpenEnv(env_cls=lab.LabEnvironment, tools=[tool], action_mapper=mapper) as env:
        assert env.tools() == [tool]
        env.reset()
        assert env.step("speak", {"words": "up"}).observation == "speak up"
        assert env.step("env_action", {"words": "up"}).info["error_kind"] == "tool"
        failed = env.step("speak", {})
        assert (failed.done, failed.info["error_kind"]) == (False, "tool")


def test_registered_tool_runs_beside_the_environment(env: OpenEnv) -> None:
    info: Any = {"type": "function", "function": {"name": "submit"}}
    env.register_tool(info, lambda e, arguments: f"{e.execute(say('scored', 9.0)).reward}")
    env.reset()
    assert env.step("submit", {}).observation == "9.0"
    assert env.episode_reward == 0.0


def test_trajectory_reaches_the_environment(env: OpenEnv) -> None:
    data = {"seed": 7, "episode_id": "e7", "greeting": "hello", "tests": "for the grader"}
    result = env.reset({"user_data": data})
    assert result.observation == "hello seed=7"
    assert result.info["reset_not_taken"] == ["tests"]
    assert env.env.state.episode_id == "e7"


def test_argument_the_environment_cannot_take_is_an_error_that_lists_what_it_can(
    env: OpenEnv,
) -> None:
    with pytest.raises(EnvError, match="'sead': it takes seed, episode_id, greeting"):
        env.reset({"user_data": {"reset_kwargs": {"sead": 1}}})
    with (
        OpenEnv(env_cls=Counter) as counter,
        pytest.raises(EnvError, match="no parameter 'seed': it takes none"),
    ):
        counter.reset({"user_data": {"seed": 1}})
    with OpenEnv(env_cls=Counter, strict_reset=False) as counter:
        result = counter.reset({"user_data": {"seed": 1}})
        assert result.info["reset_ignored"] == ["seed"]


def test_reset_kwargs_attribute_may_change_between_episodes(lab: ModuleType) -> None:
    with OpenEnv(env_cls=lab.LabEnvironment, reset_kwargs={"greeting": "first"}) as env:
        assert env.reset().observation.startswith("first")
        env.reset_kwargs = {"greeting": "second"}
        assert env.reset().observation.startswith("second")


def test_environment_that_raised_goes_on_as_on_a_server(env: OpenEnv) -> None:
    env.reset()
    env.step("any", say("x", 2.0))
    result = env.step("any", {"command": "raise", "value": "oops"})
    assert (result.done, result.observation) == (False, "Error: oops")
    assert (result.error, result.info["error_kind"]) == ("oops", "tool")
    assert env.step("any", say("again", 1.0)).info["episode_reward"] == 3.0


def test_environment_that_raised_a_fatal_error_is_over_until_reset(env: OpenEnv) -> None:
    env.fatal_errors = (RuntimeError,)
    env.reset()
    env.step("any", say("x", 2.0))
    result = env.step("any", {"command": "raise", "value": "oops"})
    assert (result.done, result.info["error_kind"]) == (True, "env")
    assert result.error is not None and "RuntimeError: oops" in result.error
    assert result.info["episode_reward"] == 2.0
    assert env.step("any", say("x")).done
    with pytest.raises(EnvError, match="oops"):
        env.execute(say("x"))
    env.reset()
    assert env.step("any", say("again")).observation == "again"
    assert env.episode_reward == 0.0


def test_the_line_where_the_environment_raised_is_logged(
    env: OpenEnv, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle_agentic.envs._log_once._logged", set[Any]())
    for _ in range(2):
        env.reset()
        env.step("any", {"command": "raise", "value": "oops"})
    (record,) = caplog.records
    assert "the step of LabEnvironment raised RuntimeError: oops" in caplog.text
    assert record.exc_text is not None and ", in step\n" in record.exc_text


def test_environment_that_exits_does_not_end_the_process(env: OpenEnv) -> None:
    env.reset()
    result = env.step("any", {"command": "exit"})
    assert (result.done, result.info["error_kind"]) == (True, "env")
    assert "SystemExit" in result.observation


def test_bad_arguments_are_an_observation_with_the_field(env: OpenEnv) -> None:
    env.reset()
    result = env.step("any", {"command": "say", "number": "many"})
    assert (result.done, result.info["error_kind"]) == (False, "tool")
    assert "number: Input should be a valid number" in result.observation
    unknown = env.step("any", {"comand": "say"})
    assert "command: Field required" in unknown.observation
    assert env.step("any", say("fine")).observation == "fine"
    with pytest.raises(ActionRefusedError) as caught:
        env.execute({"command": "say", "number": "many"})
    assert caught.value.errors[0]["loc"] == ["number"]
    raises = env.step("any", say("bomb"))
    assert "no bombs in the lab" in raises.observation


def test_arguments_that_are_no_object_are_refused(env: OpenEnv) -> None:
    env.reset()
    assert env.step("any", ["x"]).info["error_kind"] == "tool"
    assert "command: Field required" in env.step("any").observation


def test_reset_that_raises_or_reports_an_error_is_an_error(env: OpenEnv) -> None:
    with pytest.raises(EnvError, match="RuntimeError: the lab exploded"):
        env.reset({"user_data": {"greeting": "explode"}})
    assert env.step("any", say("x")).done
    with pytest.raises(EnvError, match="LAB_KEY is not set"):
        env.reset({"user_data": {"greeting": "unusable"}})


def test_step_before_reset_and_after_done(env: OpenEnv) -> None:
    assert "call reset" in env.step("any", say("x")).observation
    env.reset()
    assert env.step("any", {"command": "end"}).done
    after = env.step("any", say("x", 5.0))
    assert (after.done, after.info["episode_reward"]) == (True, 1.0)
    assert after.error


@pytest.mark.parametrize(
    ("reward", "expected", "flag"),
    [(None, 0.0, "reward_missing"), (float("nan"), 0.0, "error"), (True, 1.0, "metadata")],
)
def test_rewards_of_any_kind(reward: Any, expected: float, flag: str) -> None:
    class Odd(Counter):
        def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
            return Seen(text="x", reward=reward)

    with OpenEnv(env_cls=Odd) as env:
        env.reset()
        result = env.step("any", {})
        assert result.reward == expected
        assert flag in result.info
        assert env.episode_reward == expected


def test_numpy_scalars_are_numbers() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with openenv's own dependencies")

    class Plain:
        def reset(self, seed: int = 0) -> dict[str, Any]:
            return {"observation": {"x": numpy.float32(0.5)}, "reward": numpy.float64(0)}

        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            return {
                "observation": {"x": numpy.int64(action["x"]), "grid": numpy.eye(2, dtype=int)},
                "reward": numpy.float32(1.5),
                "done": numpy.bool_(True),
            }

    with OpenEnv(env_cls=Plain) as env:
        assert env.reset().observation == "Environment: plain\nx: 0.5"
        result = env.step("any", {"x": 3})
        assert result.observation == "x: 3\ngrid:\n1 0\n0 1"
        assert (result.reward, result.done) == (1.5, True)
        assert type(result.reward) is float and type(result.done) is bool


def test_environment_class_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(ValueError, match="no step method"):
        OpenEnv(env_cls=dict)
    with pytest.raises(ValueError, match="either env_name or env_cls"):
        OpenEnv()
    with pytest.raises(ValueError, match="either env_name or env_cls"):
        OpenEnv("a", "b:C")
    with pytest.raises(ValueError, match="tools must be"):
        OpenEnv(env_cls=Counter, tools="all")
    with pytest.raises(EnvError, match="unexpected keyword argument 'size'"):
        OpenEnv(env_cls=Counter, env_kwargs={"size": 3})
    with pytest.raises(ModuleNotFoundError, match=r"env_name='no_such_env'.*pip install"):
        OpenEnv("no_such_env")


def test_coroutine_environments_run_on_one_loop_of_their_own() -> None:
    class Async(Counter):
        loops: ClassVar[list[Any]] = []

        async def reset_async(self, seed: int | None = None, **_: Any) -> Seen:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            self.loops.append(asyncio.get_running_loop())
            return Seen(text=f"seed {seed}")

        async def step_async(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
            self.loops.append(asyncio.get_running_loop())
            await asyncio.sleep(0)
            if action.by < 0:
                raise SystemExit(3)
            return Seen(text="async", reward=1.0)

    before = threading.active_count()
    with OpenEnv(env_cls=Async) as env:
        assert env.reset({"user_data": {"seed": 4}}).observation == "seed 4"
        assert env.step("any", {"by": 1}).observation == "async"
        assert len(set(map(id, Async.loops))) == 1
        assert env.step("any", {"by": -1}).done
        assert env.reset().observation == "seed None"
    assert threading.active_count() == before


def test_environment_that_needs_one_thread_gets_it() -> None:
    class Bound(Counter):
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

        def __init__(self) -> None:
            super().__init__()
            self.thread = threading.get_ident()

        def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
            return Seen(text=str(threading.get_ident() == self.thread), reward=0.0)

    with OpenEnv(env_cls=Bound) as env, ThreadPoolExecutor(4) as threads:
        env.reset()
        results = [threads.submit(env.step, "any", {}).result() for _ in range(8)]
        assert {result.observation for result in results} == {"True"}


class Closing(Counter):
    """Tells of its end, and steps when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.stepping = threading.Event()
        self.closed_in: int | None = None

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        self.stepping.set()
        assert self.let.wait(20)
        return super().step(action)

    def close(self) -> None:
        self.closed_in = threading.get_ident()


def test_close_that_comes_during_a_step_happens_once_the_step_returns() -> None:
    env = OpenEnv(env_cls=Closing, busy_timeout_s=0.05)
    env.reset()
    inner = env.env
    with ThreadPoolExecutor(2) as threads:
        step = threads.submit(env.step, "any", {})
        assert inner.stepping.wait(20)
        with pytest.raises(EnvTimeoutError, match=r"busy_timeout_s=0\.05"):
            env.close()
        assert inner.closed_in is None
        inner.let.set()
        step.result(20)
    assert inner.closed_in is not None
    assert env.env is None
    with pytest.raises(EnvError, match="closed"):
        env.reset()
    env.close()


def test_calls_behind_a_close_are_refused() -> None:
    env = OpenEnv(env_cls=Closing, busy_timeout_s=20)
    env.reset()
    inner = env.env
    with ThreadPoolExecutor(3) as threads:
        step = threads.submit(env.step, "any", {})
        assert inner.stepping.wait(20)
        later = [threads.submit(env.close), threads.submit(env.step, "any", {})]
        inner.let.set()
        assert later[0].result(20) is None
        step.result(20)
        later[1].result(20)
    assert inner.closed_in is not None
    assert env.step("any", {}).error is not None


def test_constructor_that_fails_at_the_tools_leaves_nothing(lab: ModuleType) -> None:
    made: list[Any] = []

    class Shapeless(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.closed_in: int | None = None
            made.append(self)

        async def reset_async(self, **_: Any) -> Seen:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            return Seen()

        def close(self) -> None:
            self.closed_in = threading.get_ident()

    class NoFields:
        """An action class that does not describe itself."""

    before = threading.active_count()
    with pytest.raises(ValueError, match="needs an Action class with fields"):
        OpenEnv(env_cls=Shapeless, action_cls=NoFields, tools="auto")
    assert made[0].closed_in is not None
    assert threading.active_count() == before


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), True])
def test_busy_timeout_that_bounds_nothing_is_refused(limit: Any) -> None:
    before = Counter.closed
    with pytest.raises(ValueError, match="busy_timeout_s must be at least 0, found"):
        OpenEnv(env_cls=Counter, busy_timeout_s=limit)
    assert Counter.closed == before


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_coroutine_handler_is_awaited(env: OpenEnv, way: str) -> None:
    async def handler(e: OpenEnv, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return f"awaited {arguments['x']}"

    env.register_tool({"function": {"name": "slow"}}, handler)
    await env.areset()
    result = env.step("slow", {"x": 1}) if way == "sync" else await env.astep("slow", {"x": 1})
    assert result.observation == "awaited 1"


def test_failed_step_earns_nothing(env: OpenEnv) -> None:
    def handler(e: OpenEnv, arguments: dict[str, Any]) -> StepResult:
        return StepResult("half done", 5.0, info={"error": "it broke"} if arguments else {})

    env.register_tool({"function": {"name": "work"}}, handler)
    env.reset()
    assert env.step("work", {}).info["episode_reward"] == 5.0
    failed = env.step("work", {"break": True})
    assert (failed.info["error"], failed.info["episode_reward"]) == ("it broke", 5.0)
    assert env.episode_reward == 5.0


async def test_cancelled_step_loses_the_episode_and_the_next_waits_its_turn() -> None:
    release = threading.Event()

    class Slow(Counter):
        def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
            release.wait(20)
            return super().step(action)

    async with OpenEnv(env_cls=Slow, busy_timeout_s=0.2) as env:
        await env.areset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await env.astep("any", {})
        with pytest.raises(EnvTimeoutError, match=r"busy_timeout_s=0\.2"):
            await env.areset()
        release.set()
        env._busy_timeout_s = 20.0  # pyright: ignore[reportPrivateUsage]
        assert (await env.areset()).observation == "at 0"
        assert (await env.astep("any", {})).observation == "at 1"
        assert env.episode_reward == 1.0


def make_package(root: Path, name: str, **files: str) -> None:
    server = root / name / "server"
    server.mkdir(parents=True)
    (root / name / "__init__.py").write_text(files.pop("init", ""))
    (server / "__init__.py").touch()
    for path, text in files.items():
        where = (server if path.startswith("server_") else root / name) / (
            path.removeprefix("server_") + ".py"
        )
        where.write_text(text)


MODELS = """
from openenv.core.env_server.types import Action, Observation, State

class PieceAction(Action):
    column: int

class Board(Observation):
    text: str = ""
"""

GAME = """
from openenv.core.env_server.interfaces import Environment
from {models} import Board, PieceAction
from openenv.core.env_server.types import State

class {name}(Environment[PieceAction, Board, State]):
    def reset(self, seed=None): return Board(text="{name} new", reward=0.0)
    def step(self, action, timeout_s=None):
        return Board(text=f"{name} {{action.column}}", reward=1.0)
    @property
    def state(self): return State()
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [m for m in sys.modules if m.startswith("found_")]:
        del sys.modules[name]


def test_class_of_any_name_in_a_module_of_any_name_is_found(packages: Path) -> None:
    game = GAME.format(models="models", name="FourInARow")
    make_package(packages, "found_one", models=MODELS, server_playing=game)
    with OpenEnv("found_one") as env:
        assert env.reset().observation == "FourInARow new"
        assert env.step("drop", {"column": 3}).observation == "FourInARow 3"
        assert "column" in env.step("drop", {"row": 3}).observation


def test_of_several_classes_the_served_one_is_taken(packages: Path) -> None:
    both = GAME.format(models="models", name="DockerGame") + GAME.format(
        models="models", name="LocalGame"
    )
    app = "from .playing import LocalGame, DockerGame\napp = create_app(LocalGame, 1, 2)\n"
    make_package(packages, "found_two", models=MODELS, server_playing=both, server_app=app)
    with OpenEnv("found_two") as env:
        assert env.reset().observation == "LocalGame new"


def test_of_several_classes_that_a_factory_makes_is_taken(packages: Path) -> None:
    both = GAME.format(models="models", name="DockerGame") + GAME.format(
        models="models", name="LocalGame"
    )
    app = "def make():\n    return LocalGame()\napp = create_app(make, 1, 2)\nx = DockerGame\n"
    make_package(packages, "found_three", models=MODELS, server_playing=both, server_app=app)
    with OpenEnv("found_three") as env:
        assert env.reset().observation == "LocalGame new"


def test_ambiguity_is_named(packages: Path) -> None:
    both = GAME.format(models="models", name="GameA") + GAME.format(models="models", name="GameB")
    make_package(packages, "found_four", models=MODELS, server_playing=both)
    with pytest.raises(ImportError, match=r"2 candidates.*GameA.*GameB.*env_cls='module:Class'"):
        OpenEnv("found_four")


def test_what_was_seen_is_named_when_nothing_fits(packages: Path) -> None:
    make_package(
        packages,
        "found_five",
        server_fine="VALUE = 1\n",
        server_broken="import no_such_dependency_at_all\n",
    )
    with pytest.raises(ImportError) as caught:
        OpenEnv("found_five")
    assert "found_five.server.fine" in str(caught.value)
    assert "no_such_dependency_at_all" in str(caught.value)


def test_importing_the_package_does_not_start_its_app(packages: Path) -> None:
    game = GAME.format(models="found_six.models", name="Game")
    make_package(
        packages,
        "found_six",
        models=MODELS,
        server_game=game,
        server_app="raise SystemExit('the app must not be imported')\n",
    )
    OpenEnv("found_six").close()


def test_action_of_the_client_serves_an_environment_that_names_none(packages: Path) -> None:
    client = """
from openenv.core.env_client import EnvClient
from .models import PieceAction, Board
class GameClient(EnvClient[PieceAction, Board, dict]):
    def _step_payload(self, action): return {}
    def _parse_result(self, payload): return payload
    def _parse_state(self, payload): return payload
"""
    game = GAME.format(models="found_seven.models", name="Game").replace(
        "[PieceAction, Board, State]", ""
    )
    make_package(packages, "found_seven", models=MODELS, client=client, server_game=game)
    with OpenEnv("found_seven") as env:
        env.reset()
        assert env.step("drop", {"column": 3}).observation == "Game 3"
