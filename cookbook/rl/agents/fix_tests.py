"""An agent fixes failing test-suites, each in a sandbox of its own, 32 episodes at once.

    uv run python cookbook/rl/agents/fix_tests.py

starts the local sandbox server, and A SCRIPTED POLICY PLAYS THE MODEL: it reads the code, runs the
tests, writes a prepared patch and runs them again; some of its patches are wrong on purpose, so
that both rewards occur. Give `--base-url` (and `--model`) for a model of your own, and `--api-url`
for an AgentENV server; its template needs bash and Python 3, nothing else.

Needs, outside a clone: pip install twinkle-rollout twinkle-envs-agentenv twinkle-sandbox-server
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from twinkle_agentic.envs import AgentEnv, StepResult
from twinkle_agentic.envs.agentenv import ToolFaultError
from twinkle_agentic.envs.verdict import CompiledTests, Verdict
from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.testing import ServerProcess
from twinkle_agentic.tools.types import Message, ToolInfo, Trajectory, user_data_dict

# One entry per kind of task: the broken module, its tests, and the patches of the scripted policy.
TASKS: dict[str, dict[str, str]] = {
    "median": {
        "code": "def median(values):\n    return sorted(values)[len(values) // 2]\n",
        "tests": "self.assertEqual(median([3, 1, 2]), 2)\n"
        "        self.assertEqual(median([4, 1, 2, 3]), 2.5)",
        "patch": "def median(values):\n"
        "    values, half = sorted(values), len(values) // 2\n"
        "    if len(values) % 2:\n"
        "        return values[half]\n"
        "    return (values[half - 1] + values[half]) / 2\n",
        "wrong": "def median(values):\n    return sorted(values)[(len(values) - 1) // 2]\n",
    },
    "slugify": {
        "code": "def slugify(title):\n    return title.lower().replace(' ', '-')\n",
        "tests": "self.assertEqual(slugify('Hello World'), 'hello-world')\n"
        "        self.assertEqual(slugify('  What? A   day! '), 'what-a-day')",
        "patch": "import re\n\n\n"
        "def slugify(title):\n"
        "    return '-'.join(re.findall('[a-z0-9]+', title.lower()))\n",
        "wrong": "def slugify(title):\n    return title.strip().lower().replace(' ', '-')\n",
    },
    "chunks": {
        "code": "def chunks(items, size):\n"
        "    return [items[i : i + size] for i in range(0, len(items) - size, size)]\n",
        "tests": "self.assertEqual(chunks([1, 2, 3, 4], 2), [[1, 2], [3, 4]])\n"
        "        self.assertEqual(chunks([1, 2, 3], 2), [[1, 2], [3]])",
        "patch": "def chunks(items, size):\n"
        "    return [items[i : i + size] for i in range(0, len(items), size)]\n",
        "wrong": "def chunks(items, size):\n"
        "    return [items[i : i + size] for i in range(0, len(items) - 1, size)]\n",
    },
    "roman": {
        "code": "def roman(number):\n    return 'I' * number\n",
        "tests": "self.assertEqual(roman(3), 'III')\n"
        "        self.assertEqual(roman(1994), 'MCMXCIV')",
        "patch": "SIGNS = {1000: 'M', 900: 'CM', 500: 'D', 400: 'CD', 100: 'C', 90: 'XC',\n"
        "         50: 'L', 40: 'XL', 10: 'X', 9: 'IX', 5: 'V', 4: 'IV', 1: 'I'}\n\n\n"
        "def roman(number):\n"
        "    text = ''\n"
        "    for value, sign in SIGNS.items():\n"
        "        text += sign * (number // value)\n"
        "        number %= value\n"
        "    return text\n",
        "wrong": "def roman(number):\n    return 'M' * (number // 1000) + 'I' * (number % 1000)\n",
    },
}

TICKET = re.compile(r"Ticket (\d+).*?project/(\w+)\.py", re.DOTALL)

RUN_TESTS: ToolInfo = {
    "type": "function",
    "function": {
        "name": "run_tests",
        "description": "Run the test-suite of the project.",
        "parameters": {
            "type": "object",
            "properties": {"pattern": {"type": "string", "default": "test_*.py"}},
        },
    },
}
TEST_COMMAND = "cd ~/project && python3 -m unittest discover -p {pattern}"


class FixTestsEnv(AgentEnv):
    """A project with one broken module; the reward is whether its tests pass in the end."""

    def __init__(self, task: str, **arguments: Any) -> None:
        super().__init__(metadata={"task": task}, **arguments)
        self.task = task
        self.arguments = arguments
        self.register_command_tool(RUN_TESTS, TEST_COMMAND)

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        result = super().reset(trajectory)
        self.write_file(f"project/{self.task}.py", TASKS[self.task]["code"])
        self.write_file(f"project/test_{self.task}.py", self.tests())
        return StepResult(
            f"The project has the files project/{self.task}.py and project/test_{self.task}.py.",
            info=result.info,
        )

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        verdict = judge(self.project(), self.tests(), task=self.task, arguments=self.arguments)
        if verdict.task_fault:
            raise RuntimeError(f"the tests of {self.task!r} are at fault: {verdict.text}")
        return [float(verdict.passed)] * len(trajectories)

    def project(self) -> dict[str, str]:
        """Return the Python files of the project as the agent has left them."""
        command = "cd ~/project && find . -name '*.py' -type f -size -256k | head -n 50"
        files: dict[str, str] = {}
        for name in self.exec(command, timeout_s=30).stdout.splitlines():
            with contextlib.suppress(ToolFaultError):  # it names no file: no part of the project
                text = self.read_file(f"project/{name}").decode("utf-8", "replace")
                files[name.removeprefix("./")] = text
        return files

    def tests(self) -> str:
        return (
            f"import unittest\n\nfrom {self.task} import {self.task}\n\n\n"
            "class Tests(unittest.TestCase):\n"
            "    def test_it(self):\n"
            f"        {TASKS[self.task]['tests']}\n"
        )


def judge(
    project: Mapping[str, str], tests: str, *, task: str, arguments: Mapping[str, Any]
) -> Verdict:
    """Run the tests over a copy of the project, in a sandbox that the agent has never seen.

    The agent sees a copy of the tests, and may change that: these are those of the recipe.
    """
    compiled = CompiledTests(tests, provides=[task])
    program, key = compiled.program(project, unlink=True)
    with AgentEnv(metadata={"task": task, "role": "verdict"}, **arguments) as sandbox:
        sandbox.reset()
        sandbox.write_file("program.py", program)
        run = sandbox.exec(
            "TWINKLE_REPORT_FD=3 python3 -I program.py 3>report >/dev/null 2>&1 </dev/null",
            timeout_s=60,
        )
        try:
            report = sandbox.read_file("report").decode("utf-8", "replace")
        except ToolFaultError:  # the code under test took it away
            report = ""
    return compiled.read_report(report, key, ended="timeout" if run.timed_out else "")


class ScriptedPolicy(API):
    """Not a model: prepared moves, every fourth episode with a patch that is wrong."""

    def __call__(self, trajectory: Trajectory, sampling_params: Any, **kwargs: Any) -> Message:
        messages: list[Any] = list(trajectory.get("messages", []))
        seen = TICKET.search(str(messages[0]["content"]))
        assert seen is not None
        turn = sum(message["role"] == "assistant" for message in messages)
        ticket, task = int(seen[1]), seen[2]
        patch = TASKS[task]["wrong" if ticket % 4 == ticket // 4 % 4 else "patch"]
        path = f"project/{task}.py"
        moves: list[tuple[str, dict[str, Any]]] = [
            ("read_file", {"path": path}),
            ("run_tests", {}),
            ("write_file", {"path": path, "content": patch}),
            ("run_tests", {}),
        ]
        if turn == len(moves):
            return {"role": "assistant", "content": "This is my solution."}
        name, arguments = moves[turn]
        call: Any = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def rollout(api: API, api_url: str, episodes: int, template: str) -> list[Any]:
    """Run the episodes, all at once, and return the scored trajectories."""
    names = list(TASKS)
    trajectories: list[Any] = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"Ticket {index}: the tests fail. Fix the code, not the tests.",
                }
            ],
            "user_data": {"task": names[index % len(names)], "episode_id": index},
        }
        for index in range(episodes)
    ]
    run = APIMultiTurnRollout(
        api=api,
        env_factory=lambda trajectory: FixTestsEnv(
            user_data_dict(trajectory)["task"],
            template=template,
            api_url=api_url,
            sandbox_timeout=300,
            command_timeout=60,
            on_timeout="kill",
            run="fix-tests",
        ),
        max_turns=10,
        deadline_s=300,
    )
    return list(run(trajectories))


@contextlib.contextmanager
def sandbox_server(api_url: str | None) -> Generator[str, None, None]:
    """Give the address of a sandbox server, started here unless there is one."""
    if api_url:
        yield api_url
        return
    if importlib.util.find_spec("sandbox_server") is None:
        print(
            "no sandbox server is installed: run `pip install twinkle-sandbox-server`, or give "
            "--api-url",
            file=sys.stderr,
        )
        sys.exit(2)
    command = [sys.executable, "-m", "sandbox_server"]
    with ServerProcess("sandbox server", lambda port: [*command, "--port", str(port)]) as server:
        server.wait_ready(60)
        yield server.url


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--api-url", help="a sandbox server; by default one of our own")
    parser.add_argument("--template", default="base")
    parser.add_argument("--base-url", help="a chat-completions endpoint; by default the script")
    parser.add_argument("--model", default="default")
    options = parser.parse_args()
    api: API = ScriptedPolicy()
    if options.base_url:
        api = OpenAI(options.model, base_url=options.base_url)
    else:
        print("A scripted policy plays the model.")
    with sandbox_server(options.api_url) as url:
        done = rollout(api, url, options.episodes, options.template)
    for task in TASKS:
        mine = [t for t in done if t["user_data"]["task"] == task]
        scores = [t["reward"] for t in mine if t["reward"] is not None]
        mean = f"{sum(scores) / len(scores):.2f}" if scores else "-"
        print(f"{task:10} {len(scores)} of {len(mine)} episodes scored, mean reward {mean}")
    print("stop reasons:", dict(Counter(str(t["stop_reason"]) for t in done)))
    print("first error:", next((t["error"] for t in done if t["error"]), "none"))
    return 0 if all(t["reward"] is not None for t in done) else 1


if __name__ == "__main__":
    sys.exit(main())
