"""A chat-completions endpoint that plays a script, in a process of its own.

The name of the model chooses the script. Every request is checked against the rules real servers
apply; one that breaks them is answered with HTTP 400 and the rule, so each test that passes has
sent valid history only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from typing import Any, cast

from aiohttp import web

FIELDS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}
counts: Counter[str] = Counter()
peak: dict[str, int] = {}
running: Counter[str] = Counter()
kept: set[Any] = set()


def broken_rule(body: dict[str, Any]) -> str | None:
    messages: Any = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages must be a non-empty list"
    if body.get("tools") == []:
        return "tools must not be empty"
    seen: set[str] = set()
    open_calls: list[str] = []
    for message in cast("list[dict[str, Any]]", messages):
        role = message.get("role")
        if role not in FIELDS:
            return f"unknown role {role!r}"
        if extra := set(message) - FIELDS[str(role)]:
            return f"unknown fields {sorted(extra)} in a {role} message"
        if not isinstance(message.get("content"), (str, list)):
            return f"content of a {role} message must be text"
        if role == "tool":
            if not open_calls or message.get("tool_call_id") != open_calls.pop(0):
                return "a tool message answers no call, or out of order"
            continue
        if open_calls:
            return "a call is not answered"
        if "tool_calls" in message:
            if not message["tool_calls"]:
                return "tool_calls must not be empty"
            for call in message["tool_calls"]:
                if set(call) != {"id", "type", "function"} or call["type"] != "function":
                    return f"malformed call {call!r}"
                if not isinstance(call["id"], str) or not call["id"] or call["id"] in seen:
                    return f"call id {call['id']!r} is empty or not unique"
                seen.add(call["id"])
                open_calls.append(call["id"])
                if not call["function"]["name"]:
                    return "a call has no name"
                try:
                    arguments = json.loads(call["function"]["arguments"])
                except (TypeError, ValueError):
                    return f"arguments are no JSON: {call['function']['arguments']!r}"
                if not isinstance(arguments, dict):
                    return "arguments are no object"
    return "a call is not answered" if open_calls else None


def call(arguments: Any = '{"text": "hi"}', name: Any = "echo", id: Any = "c") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content: Any = "", calls: Any = None, finish: Any = None, **extra: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls is not None:
        message["tool_calls"] = calls
    finish = finish or ("tool_calls" if calls else "stop")
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, **extra}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def ok(data: Any) -> web.Response:
    return web.json_response(data)


def failing(status: int, error: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": error}, status=status, headers=headers)


def turn_of(body: dict[str, Any]) -> int:
    return sum(m["role"] == "assistant" for m in body["messages"]) + 1


async def play(model: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    turn = turn_of(body)
    kind, _, detail = model.partition(":")
    key = f"{model}/{json.dumps(body['messages'][0])}"
    counts[key] += 1
    tries = counts[key]
    match kind:
        case "answer":
            return ok(reply("42"))
        case "tools":  # tools:N calls a tool on N turns, then answers
            if turn <= int(detail):
                return ok(reply(None, [call(id=f"c{turn}")]))
            return ok(reply("done"))
        case "slow":  # slow:S answers after S seconds
            await asyncio.sleep(float(detail))
            return ok(reply("late"))
        case "always":  # always one call
            return ok(reply("", [call(id=f"c{turn}")]))
        case "guess":  # the arguments are spelled out in the name
            return ok(reply("", [call(detail, "guess", f"g{turn}")]))
        case "parallel":
            calls = [call(f'{{"text": "{n}"}}', detail or "echo", f"p{turn}_{n}") for n in range(3)]
            return ok(reply("", calls) if turn == 1 else reply("done"))
        case "null_ids":
            return ok(reply("", [call(id=None), call(id=None)]) if turn <= 2 else reply("done"))
        case "same_ids":
            return ok(reply("", [call(), call()]) if turn <= 2 else reply("done"))
        case "bad_arguments":
            bad = [call('{"text": "cut', id="a"), call("[1]", id="b"), call({"text": "x"}, id="d")]
            bad += [call('{"text": NaN}', id="e"), call('"{\\"text\\": \\"twice\\"}"', id="f")]
            return ok(reply("", bad) if turn == 1 else reply("done"))
        case "bad_calls":
            return ok(
                reply("", [None, "x", {"id": "q"}, call(name=""), call(name="a b.c")])
                if turn == 1
                else reply("done")
            )
        case "lying_stop":
            return ok(reply("", [call(id=f"c{turn}")], "stop") if turn == 1 else reply("done"))
        case "empty_calls":
            return ok(reply("fin", [], "tool_calls"))
        case "cut_call":
            return ok(reply("I will", [call('{"text": "rm -rf', id="c")], "length"))
        case "filtered":
            return ok(reply("no", [call('{"text": "cu')], "content_filter"))
        case "gives_up":  # gives_up:REASON gives the turn up in the middle of a call
            return ok(reply("hal", [call('{"text": "cu')], detail))
        case "no_tools":  # as vLLM without a parser
            needs = "requires --enable-auto-tool-choice and --tool-call-parser to be set"
            return failing(400, {"message": f'"auto" tool choice {needs}'})
        case "as_text":
            return ok(reply('<tool_call>{"name": "echo"}</tool_call>'))
        case "extras":
            return ok(
                reply("", [{**call(id=f"c{turn}"), "index": 0}] if turn == 1 else None)
                | {
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": "tool_calls" if turn == 1 else "stop",
                            "message": {
                                "role": "assistant",
                                "content": None,
                                "reasoning_content": "hm",
                                "audio": None,
                                "refusal": None,
                                "function_call": None,
                                "annotations": [],
                                "tool_calls": [{**call(id=f"c{turn}"), "index": 0}]
                                if turn == 1
                                else [],
                            },
                        }
                    ]
                }
            )
        case "status":  # status:CODE always
            return failing(
                int(detail), {"message": f"code {detail} from the provider", "code": None}
            )
        case "flaky":  # flaky:CODE fails twice, then answers
            if tries <= 2:
                return failing(int(detail), {"message": "busy"}, {"Retry-After": "0.05"})
            return ok(reply("at last"))
        case "retry_after":
            return failing(429, {"message": "slow down"}, {"Retry-After": detail})
        case "quota":
            return failing(429, {"message": "no money", "code": "insufficient_quota"})
        case "drop":  # closes the connection twice, then answers
            if tries <= 2:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            return ok(reply("at last"))
        case "stale":  # closes a kept connection when it is used again
            assert request.transport is not None
            peer = request.transport.get_extra_info("peername")
            if peer in kept:
                request.transport.close()
                return web.Response()
            kept.add(peer)
            return ok(reply("fresh"))
        case "hangs_up":  # closes every connection
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        case "context":
            if turn == 1:
                return ok(reply("", [call(id="c1")]))
            return failing(
                400,
                {
                    "message": "This model's maximum context length is 2048 tokens. However, "
                    "you requested 3000 tokens.",
                    "type": "BadRequestError",
                    "code": 400,
                },
            )
        case "error_200":
            return ok({"error": {"message": "upstream exploded", "code": 502}, "choices": None})
        case "no_choices":
            return ok(
                {"choices": [] if detail == "list" else None, "error": {"message": "moderated"}}
            )
        case "html":
            return web.Response(text="<html>login</html>", content_type="text/html")
        case "null_body":
            return ok(None)
        case "no_message":
            return ok({"choices": [{"index": 0}]})
        case "redirect":
            return web.Response(status=302, headers={"Location": "https://elsewhere.invalid/"})
        case "truncated":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            assert request.transport is not None
            request.transport.close()
            return response
        case "hang":
            await asyncio.Event().wait()
        case "drip":
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(b" ")
                    await asyncio.sleep(0.02)
            return response
        case "huge":
            if detail == "chunked":
                response = web.StreamResponse()
                await response.prepare(request)
                with contextlib.suppress(ConnectionError):
                    for _ in range(1000):
                        await response.write(b" " * 65536)
                return response
            return ok(reply("x" * 4_000_000))
        case "tokens":
            data = reply(
                "ok",
                token_ids=[7, 8],
                logprobs={"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            )
            if detail == "short":
                data["choices"][0]["logprobs"]["content"].pop()
            if detail == "missing":
                data = reply("ok")
            return ok(data | {"prompt_token_ids": [1, 2, 3]})
        case "no_usage":
            data = reply("", [call(id=f"c{turn}")])
            del data["usage"]
            return ok(data)
        case "body":  # answers with the request
            return ok(reply(json.dumps(body)))
        case "headers":
            return ok(reply(json.dumps(dict(request.headers))))
        case "surrogate":
            if turn == 1:
                return web.Response(
                    body=b'{"choices": [{"message": {"content": "a\\ud800b", "tool_calls": [{"id": '
                    b'"s", "function": {"name": "echo", "arguments": '
                    b'"{\\"text\\": \\"\\\\ud800\\"}"}}]}, "finish_reason": "tool_calls"}]}',
                    content_type="application/json",
                )
            sent = await request.text()
            return (
                failing(400, "lone surrogate") if "\\ud800" in sent.lower() else ok(reply("done"))
            )
        case _:
            pass
    return failing(404, {"message": f"no model {model!r}"})


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    model = str(body.get("model"))
    if rule := broken_rule(body):
        return failing(400, {"message": f"invalid history: {rule}"})
    running[model] += 1
    peak[model] = max(peak.get(model, 0), running[model])
    try:
        return await play(model, body, request)
    finally:
        running[model] -= 1


async def stats(request: web.Request) -> web.Response:
    return web.json_response({"counts": counts, "peak": peak, "running": running})


async def main() -> None:
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", completions)
    app.router.add_get("/stats", stats)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    # Ends with its parent, which holds the other end of stdin.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
