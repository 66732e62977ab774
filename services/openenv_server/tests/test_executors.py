"""What both executors promise, in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from openenv_server.environment import CodingEnvironment
from openenv_server.executor import Executor
from openenv_server.executors import EXECUTORS, make_executor
from openenv_server.settings import EXECUTOR_NAMES, Settings
from openenv_server.wire import CodeAction


def test_every_name_makes_an_executor() -> None:
    assert set(EXECUTORS) == set(EXECUTOR_NAMES)


@pytest.fixture(params=EXECUTOR_NAMES)
def make(request: pytest.FixtureRequest) -> Callable[..., Executor]:
    def make(**settings: float) -> Executor:
        return make_executor(Settings(executor=request.param, **settings))  # pyright: ignore[reportArgumentType]

    return make


def test_names_stay_between_runs(make: Callable[..., Executor]) -> None:
    executor = make()
    executor.run("x = 3\ndef f(): return x * 2")
    assert executor.run("x = 5\nprint(f())").stdout == "10\n"


def test_names_of_earlier_steps_are_seen_in_functions_and_comprehensions(
    make: Callable[..., Executor],
) -> None:
    executor = make()
    executor.run("base = 10\nclass Box:\n    def get(self): return base")
    executor.run("def add(x): return x + base")
    code = "print([add(x) + base for x in range(2)], Box().get(), (lambda: base)())"
    assert executor.run(code).stdout == "[20, 21] 10 10\n"


def test_a_lone_surrogate_does_not_cost_the_output() -> None:
    step = CodingEnvironment(Settings()).step(CodeAction(code="print('a' + chr(0xD800) + 'b')"))
    assert step.model_dump_json()
    assert (step.stdout.strip()[0], step.stdout.strip()[-1], step.exit_code) == ("a", "b", 0)


def test_closing_twice_is_fine(make: Callable[..., Executor]) -> None:
    executor = make()
    executor.run("x = 1")
    executor.close()
    executor.close()


@pytest.mark.parametrize("code", ["raise SystemExit(2)", "raise KeyboardInterrupt", "1 / 0", "("])
def test_failure_is_a_result(make: Callable[..., Executor], code: str) -> None:
    result = make().run(code)
    assert result.exit_code != 0
    assert result.failure is not None
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_printed_text_survives_an_exception(make: Callable[..., Executor]) -> None:
    assert make().run("print('kept')\n1 / 0").stdout.startswith("kept\n")


def test_the_clock_ends_a_loop(make: Callable[..., Executor]) -> None:
    result = make(step_timeout_s=0.1).run("for i in range(10**9): pass")
    assert result.failure == "timeout"
    assert "0.1 s" in result.stderr


def test_a_function_from_an_earlier_step_has_the_time_of_this_one(
    make: Callable[..., Executor],
) -> None:
    executor = make(step_timeout_s=0.3)
    made = executor.run("def outer():\n    def f(): return 7\n    return f\ng = outer()")
    assert made.exit_code == 0
    assert executor.run("while True: pass").failure == "timeout"  # past the first step's deadline
    result = executor.run("print(g())")
    assert (result.stdout, result.stderr) == ("7\n", "")


def test_interrupt_from_outside_is_not_taken_for_the_codes_own(
    make: Callable[..., Executor],
) -> None:
    """Ctrl-C in a process that runs the environment in its main thread ends the process."""
    executor = make()
    thread = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run("for i in range(10**8): pass")
    thread.join()


def test_environment_runs_without_a_server() -> None:
    env = CodingEnvironment(Settings())
    first = env.reset(seed=1, episode_id="a")
    observation = env.step(CodeAction(code="print(1 + 1)"))
    env.close()
    assert (first.stdout, observation.stdout, env.state.step_count) == ("", "2\n", 1)
    assert env.state.episode_id == "a"


def test_episode_ids_are_made_up_and_differ() -> None:
    env = CodingEnvironment(Settings())
    seen: list[str | None] = []
    for _ in range(3):
        env.reset()
        seen.append(env.state.episode_id)
    assert all(seen)
    assert all(a != b for a, b in pairwise(seen))


def test_two_environments_in_two_threads_do_not_mix() -> None:
    """Same names, printed at the same time."""
    seen: dict[int, str] = {}

    def run(number: int) -> None:
        env = CodingEnvironment(Settings())
        env.reset()
        code = f"x = {number}\nfor i in range(300): print(x)"
        seen[number] = env.step(CodeAction(code=code)).stdout

    threads = [threading.Thread(target=run, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {number: f"{number}\n" * 300 for number in range(8)}


def test_stock_executor_keeps_the_interpreters_own_ways() -> None:
    executor = make_executor(Settings(executor="stock"))
    assert executor.run("print('a')\n5").stdout == "a\n\n5"
    assert executor.run("@nothing\ndef f(): return 1\nprint(f())").stdout.startswith("1\n")
