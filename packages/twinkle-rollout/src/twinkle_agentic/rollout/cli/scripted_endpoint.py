"""A scripted policy behind a real chat-completions endpoint. It is no model.

`quickstart` uses it so that a newcomer sees whole episodes without a GPU: for each task it hands in
the attempts of a script, then gives up or repeats itself. With `--faults` it misbehaves as real
endpoints do, on a fixed schedule, to show that every trajectory is accounted for.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

__all__ = ["FAULTS", "ScriptedPolicy", "serve"]

_TASK = re.compile(r"function `(\w+)\(")
_HANG_S = 300.0  # longer than any client should wait

FAULTS = ("error_500", "hang", "malformed_call", "null_id", "empty_choices", "unknown_tool")
"""What `--faults` does, one after another; between two faulty requests one is answered well."""


class ScriptedPolicy:
    """Looks up the task in its script and gives one prepared message after another.

    Args:
        script: By the name of a function, which the task names in backticks with its bracket: an
            object with `attempts` (source codes to hand in, one after the other) and what comes
            `then`, `give_up` or `repeat`. By any other text that occurs in the conversation: a list
            of assistant messages. Attempts are handed in with `submit_solution`; where that is not
            among the tools, only the first is, with `run_python`, which shows no verdict.
    """

    def __init__(self, script: Mapping[str, Any]) -> None:
        self._script = script

    @classmethod
    def from_file(cls, path: Path | None = None) -> ScriptedPolicy:
        """Read a script; without a path that of the packaged tasks of `quickstart`.

        Raises:
            ValueError: It is no JSON object.
            OSError: It cannot be read.
        """
        packaged = files("twinkle_agentic.rollout.cli") / "data/scripted_policy.json"
        script: Any = json.loads((path or packaged).read_text("utf-8"))
        if not isinstance(script, dict):
            raise ValueError("a script is a JSON object: the name of a task -> what to answer")
        return cls(cast("dict[str, Any]", script))

    def reply(
        self, messages: list[dict[str, Any]], *, tool: str = "submit_solution"
    ) -> dict[str, Any] | None:
        """Return the next assistant message of a conversation.

        Args:
            messages: The conversation.
            tool: What to hand in with.

        Returns:
            The message; `None` where the script has no such task, or no further message for it.
        """
        text = "\n".join(str(message.get("content")) for message in messages)
        named = _TASK.search(text)
        entry: Any = self._script.get(named[1]) if named else None
        if entry is None:
            said_of = [k for k, v in self._script.items() if isinstance(v, list) and k in text]
            prepared: list[Any] = self._script[said_of[0]] if said_of else []
            said = sum(message.get("role") == "assistant" for message in messages)
            return {"role": "assistant", **prepared[said]} if said < len(prepared) else None
        handed_in = sum(message.get("role") == "tool" for message in messages)
        attempts = entry["attempts"]
        if tool != "submit_solution":
            attempts = attempts[:1]
            if handed_in and attempts:
                return {"role": "assistant", "content": "That is my solution."}
        if handed_in < len(attempts):
            return _call(tool, attempts[handed_in], handed_in)
        if entry["then"] == "repeat" and attempts:
            return _call(tool, attempts[-1], handed_in)
        return {"role": "assistant", "content": "I do not know how to solve this."}


def _call(tool: str, code: str, number: int) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps({"code": code})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "Here is my solution.", "tool_calls": [call]}


def _tool_of(request: dict[str, Any]) -> str:
    """Choose the tool to hand in with."""
    offered = {tool["function"]["name"] for tool in request.get("tools") or ()}
    return "run_python" if offered and "submit_solution" not in offered else "submit_solution"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    policy: ScriptedPolicy
    faults: bool
    delay_s: float
    _lock = threading.Lock()
    _requests = 0

    def do_GET(self) -> None:
        if self.path in ("/health", "/v1/models"):
            self._answer(200, {"object": "list", "data": [{"id": "scripted-policy"}]})
        else:
            self._answer(404, {"error": {"message": f"no such path: {self.path}"}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path != "/v1/chat/completions":
            self._answer(404, {"error": {"message": f"no such path: {self.path}"}})
            return
        try:
            request = cast("dict[str, Any]", json.loads(body))
            messages = cast("list[dict[str, Any]]", request["messages"])
            tool = _tool_of(request)
        except (ValueError, KeyError, TypeError):
            self._answer(400, {"error": {"message": "the body must be JSON with `messages`"}})
            return
        time.sleep(self.delay_s)
        message = self.policy.reply(messages, tool=tool)
        if message is None:
            text = "the script has no answer to this conversation: see --script"
            self._answer(400, {"error": {"message": text}})
            return
        fault = self._next_fault() if self.faults else None
        if fault == "error_500":
            self._answer(500, {"error": {"message": "scripted failure"}})
            return
        if fault == "hang":
            time.sleep(_HANG_S)
            return
        if fault == "empty_choices":
            self._answer(200, {"choices": [], "error": {"message": "scripted empty answer"}})
            return
        for call in message.get("tool_calls", []):
            if fault == "malformed_call":
                call["function"]["arguments"] = call["function"]["arguments"][:-9]
            elif fault == "null_id":
                call["id"] = None
            elif fault == "unknown_tool":
                call["function"]["name"] = "submit_answer"
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        self._answer(
            200, {"object": "chat.completion", "model": "scripted-policy", "choices": [choice]}
        )

    def _next_fault(self) -> str | None:
        with self._lock:
            number = _Handler._requests
            _Handler._requests += 1
        return FAULTS[(number // 2) % len(FAULTS)] if number % 2 else None

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: the client reports what happened."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1_024  # every episode may connect at the same moment

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet about clients that hang up on a scripted hang."""


def serve(port: int, policy: ScriptedPolicy, *, faults: bool = False, delay_s: float = 0.0) -> None:
    """Serve a policy on the loopback interface until the process ends.

    Args:
        port: TCP port.
        policy: What answers.
        faults: Misbehave on every second request, going through `FAULTS` in turn.
        delay_s: Seconds each answer takes, as a model would.
    """
    fields = {"policy": policy, "faults": faults, "delay_s": delay_s}
    handler = type("Handler", (_Handler,), fields)
    with _Server(("127.0.0.1", port), handler) as server:
        sys.stdout.write(f"scripted policy on http://127.0.0.1:{server.server_port}/v1\n")
        sys.stdout.flush()
        server.serve_forever()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--faults", action="store_true", help="misbehave on every second request")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds each answer takes")
    parser.add_argument(
        "--script",
        type=Path,
        help="JSON file: by a text of the task a list of assistant messages, or by the name of a "
        "function its attempts; by default that of the quickstart tasks",
    )
    options = parser.parse_args()
    try:
        policy = ScriptedPolicy.from_file(options.script)
    except (OSError, ValueError) as error:
        parser.error(f"--script {options.script}: {error}")
    serve(options.port, policy, faults=options.faults, delay_s=options.delay_s)


if __name__ == "__main__":
    _main()
