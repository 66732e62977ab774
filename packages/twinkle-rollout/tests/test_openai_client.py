from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest

from twinkle_agentic.protocol import (
    API,
    ApiConnectionError,
    ApiError,
    ApiErrorKind,
    ApiReplyError,
    ApiStatusError,
    ApiTimeoutError,
    ContextLengthError,
    OpenAI,
    RetryPolicy,
    SamplingParams,
)
from twinkle_agentic.protocol._reply import error_of
from twinkle_agentic.protocol._transport import connection_limit, proxy_for
from twinkle_agentic.protocol.retry import parse_retry_after

HELLO: Any = {"messages": [{"role": "user", "content": "Hello"}]}
PARAMS = SamplingParams()


def test_call_returns_the_assistant_message(api: Any) -> None:
    message = api("answer")(HELLO, PARAMS)
    assert message == {"role": "assistant", "content": "42", "finish_reason": "stop"}


def test_call_works_inside_a_running_loop(api: Any) -> None:
    async def main() -> Any:
        return api("answer")(HELLO, PARAMS)

    assert asyncio.run(main())["content"] == "42"


def test_client_is_an_api() -> None:
    assert issubclass(OpenAI, API)


def sent(api: Any, params: Any, **kwargs: Any) -> dict[str, Any]:
    return json.loads(api("body")(HELLO, params, **kwargs)["content"])


def test_sampling_params_reach_the_request(api: Any) -> None:
    params = SamplingParams(
        max_tokens=9, seed=3, stop=["a"], temperature=0.5, top_p=0.9, logprobs=2
    )
    assert sent(api, params) == {
        "model": "body",
        **HELLO,
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
        "seed": 3,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 2,
    }


def test_token_stops_penalty_and_top_k_keep_their_names(api: Any) -> None:
    body = sent(api, SamplingParams(stop=[7], repetition_penalty=1.1, top_k=5))
    assert body["stop_token_ids"] == [7]
    assert (body["repetition_penalty"], body["top_k"]) == (1.1, 5)
    assert "frequency_penalty" not in body


def test_any_object_with_the_attributes_is_sampling_params(api: Any) -> None:
    class Foreign:
        temperature = 0.0
        max_tokens = 3

    body = sent(api, Foreign())
    assert (body["temperature"], body["max_tokens"], body["top_p"]) == (0.0, 3, 1.0)


def test_extra_body_and_overrides_are_merged(api: Any) -> None:
    body = sent(api, PARAMS, tool_choice="auto", extra_body={"return_token_ids": True})
    assert (body["tool_choice"], body["return_token_ids"]) == ("auto", True)


def test_key_and_default_headers_are_sent(api: Any) -> None:
    client = api("headers", client_kwargs={"default_headers": {"X-Run": "7"}, "organization": "o"})
    headers = json.loads(client(HELLO, PARAMS, extra_headers={"X-Turn": "1"})["content"])
    assert headers["Authorization"] == "Bearer key"
    assert (headers["X-Run"], headers["X-Turn"], headers["OpenAI-Organization"]) == ("7", "1", "o")


def test_no_key_sends_no_authorization(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    headers = json.loads(OpenAI("headers", base_url=f"{server}/v1")(HELLO, PARAMS)["content"])  # type: ignore[index,arg-type]
    assert "Authorization" not in headers


def test_key_and_url_come_from_the_environment(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server}/v1/")
    headers = json.loads(OpenAI("headers")(HELLO, PARAMS)["content"])  # type: ignore[index,arg-type]
    assert headers["Authorization"] == "Bearer from-env"


def test_unknown_client_option_is_refused() -> None:
    with pytest.raises(TypeError, match="http_client"):
        OpenAI("m", client_kwargs={"http_client": None})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"base_url": "127.0.0.1:8000/v1"},
        {"client_kwargs": {"timeout": 0}},
        {"client_kwargs": {"timeout": None}},
        {"client_kwargs": {"max_connections": -1}},
        {"client_kwargs": {"max_retries": -1}},
    ],
)
def test_bad_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OpenAI("m", **kwargs)


def test_streaming_is_refused(api: Any) -> None:
    with pytest.raises(ValueError, match="stream"):
        api("answer")(HELLO, PARAMS, extra_body={"stream": True})


def test_nan_never_reaches_the_wire(api: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        api("answer")(HELLO, PARAMS, extra_body={"x": float("nan")})


@pytest.mark.parametrize("model", ["flaky:429", "flaky:500", "flaky:503", "flaky:408", "drop"])
def test_what_can_pass_is_retried(api: Any, model: str) -> None:
    message = api(model)({"messages": [{"role": "user", "content": model}]}, PARAMS)
    assert message["content"] == "at last"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_retried(api: Any, stats: Any, status: int) -> None:
    text = f"refuse {status}"
    with pytest.raises(ApiStatusError, match=f"code {status} from the provider") as caught:
        api(f"status:{status}")({"messages": [{"role": "user", "content": text}]}, PARAMS)
    assert (caught.value.status, caught.value.kind) == (status, ApiErrorKind.REFUSED)
    assert not caught.value.retryable
    assert sum(n for key, n in stats()["counts"].items() if text in key) == 1


def test_attempts_are_bounded(api: Any, stats: Any) -> None:
    with pytest.raises(ApiStatusError) as caught:
        api("status:500")({"messages": [{"role": "user", "content": "bounded"}]}, PARAMS)
    assert caught.value.attempts == 4
    assert caught.value.retryable
    assert sum(n for key, n in stats()["counts"].items() if "bounded" in key) == 4


def test_max_retries_zero_sends_once(server: str, stats: Any) -> None:
    client = OpenAI("status:500", base_url=f"{server}/v1", client_kwargs={"max_retries": 0})
    with pytest.raises(ApiStatusError):
        client({"messages": [{"role": "user", "content": "once only"}]}, PARAMS)
    assert sum(n for key, n in stats()["counts"].items() if "once only" in key) == 1


def test_used_up_quota_is_not_retried(api: Any) -> None:
    with pytest.raises(ApiStatusError, match="no money") as caught:
        api("quota")(HELLO, PARAMS)
    assert caught.value.attempts == 1


def test_retry_after_beyond_the_limit_gives_the_error_at_hand(api: Any) -> None:
    with pytest.raises(ApiStatusError, match="slow down") as caught:
        api("retry_after:30", client_kwargs={"timeout": 5})(HELLO, PARAMS)
    assert caught.value.retry_after_s == 30
    assert caught.value.kind is ApiErrorKind.RATE_LIMITED


@pytest.mark.parametrize("model", ["hang", "drip"])
def test_a_request_has_a_total_limit(api: Any, model: str) -> None:
    with pytest.raises(ApiTimeoutError, match=r"within 0\.2 s") as caught:
        api(model, client_kwargs={"timeout": 0.2})(HELLO, PARAMS)
    assert isinstance(caught.value, TimeoutError)


def test_a_hung_attempt_is_repeated_where_attempts_have_a_limit(api: Any, stats: Any) -> None:
    policy = RetryPolicy(max_attempts=2, base_delay_s=0, attempt_timeout_s=0.1)
    with pytest.raises(ApiTimeoutError, match=r"within 0\.1 s"):
        api("hang", retry=policy)({"messages": [{"role": "user", "content": "twice"}]}, PARAMS)
    assert sum(n for key, n in stats()["counts"].items() if "twice" in key) == 2


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("html", "login"),
        ("null_body", "no JSON object"),
        ("no_message", "no message"),
        ("no_choices:list", "moderated"),
        ("no_choices:null", "moderated"),
        ("error_200", "upstream exploded"),
        ("redirect", "elsewhere.invalid"),
    ],
)
def test_a_reply_that_is_no_completion_gives_the_providers_words(
    api: Any, model: str, match: str
) -> None:
    with pytest.raises(ApiError, match=match):
        api(model)(HELLO, PARAMS)


def test_error_in_a_200_reply_is_classified_by_its_code(api: Any) -> None:
    with pytest.raises(ApiStatusError) as caught:
        api("error_200")(HELLO, PARAMS)
    assert (caught.value.kind, caught.value.retryable) == (ApiErrorKind.SERVER_ERROR, True)
    assert caught.value.attempts == 4


def test_a_cut_body_is_a_connection_error(api: Any) -> None:
    with pytest.raises(ApiConnectionError) as caught:
        api("truncated")(HELLO, PARAMS)
    assert caught.value.attempts == 4


async def test_a_kept_connection_that_the_server_has_closed_costs_no_attempt(api: Any) -> None:
    client = api("stale", retry=RetryPolicy(max_attempts=1))
    async with client.lease():
        for _ in range(4):
            completion = await client.acomplete(HELLO, PARAMS)
            assert completion.messages[0]["content"] == "fresh"


def test_a_server_that_hangs_up_is_asked_once_more_than_the_attempts(api: Any, stats: Any) -> None:
    with pytest.raises(ApiConnectionError):
        api("hangs_up", retry=RetryPolicy(max_attempts=3, base_delay_s=0.0))(HELLO, PARAMS)
    assert sum(n for key, n in stats()["counts"].items() if key.startswith("hangs_up/")) == 4


@pytest.mark.parametrize("model", ["huge", "huge:chunked"])
def test_a_reply_above_the_size_limit_is_refused(api: Any, model: str) -> None:
    with pytest.raises(ApiReplyError, match="max_response_bytes") as caught:
        api(model, client_kwargs={"max_response_bytes": 1_000_000})(HELLO, PARAMS)
    assert caught.value.kind is ApiErrorKind.TOO_LARGE


def test_context_length_has_its_own_error(api: Any) -> None:
    trajectory: Any = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "x"}]}
    with pytest.raises(ContextLengthError, match="2048 tokens"):
        api("context")(trajectory, PARAMS)


@pytest.mark.parametrize(
    ("status", "error", "context"),
    [
        (400, {"message": "x", "code": "context_length_exceeded"}, True),  # OpenAI
        (
            400,
            {"message": "This model's maximum context length is 2048 tokens. However, ..."},
            True,
        ),
        (
            400,
            {"message": "The decoder prompt (length 9) is longer than the maximum model length"},
            True,
        ),
        (
            400,
            {"message": "The input (9 tokens) is longer than the model's context length (8)"},
            True,
        ),  # SGLang
        (
            400,
            {"message": "exceeds the available context size", "type": "exceed_context_size_error"},
            True,
        ),  # llama.cpp
        (422, {"message": "`inputs` tokens + `max_new_tokens` must be <= 4096"}, True),  # TGI
        (400, "prompt is too long: 9 tokens > 8 maximum", True),
        (400, {"message": "max_tokens=5000 cannot be greater than max_model_len=2048."}, False),
        (400, {"message": "Invalid value for temperature"}, False),
        (500, {"message": "maximum context length"}, False),
        (429, {"message": "too many tokens per minute"}, False),
    ],
)
def test_servers_say_in_many_ways_that_a_prompt_is_too_long(
    status: int, error: Any, context: bool
) -> None:
    found = error_of(status, {}, json.dumps({"error": error}).encode())
    assert isinstance(found, ContextLengthError) is context


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[1]", b"null", b'{"detail": "d"}', b"\xff", b"[" * 99999]
)
def test_any_error_body_gives_an_error_with_its_status(body: bytes) -> None:
    assert str(error_of(503, {}, body)).startswith("HTTP 503: ")


def test_nobody_listening_is_a_connection_error() -> None:
    client = OpenAI("m", base_url="http://127.0.0.1:9/v1", client_kwargs={"max_retries": 0})
    with pytest.raises(ApiConnectionError, match=r"127\.0\.0\.1:9"):
        client(HELLO, PARAMS)


async def test_requests_beyond_the_connections_wait(api: Any, stats: Any) -> None:
    # All together take longer than one may; the limit holds for each from its own start.
    client = api("slow:0.15", client_kwargs={"max_connections": 2, "timeout": 1.2})
    done = await asyncio.gather(*(client.acomplete(HELLO, PARAMS) for _ in range(20)))
    assert [c.messages[0]["content"] for c in done] == ["late"] * 20
    assert stats()["peak"]["slow:0.15"] == 2


async def test_no_connection_outlives_the_last_user(api: Any) -> None:
    client = api("answer")
    async with client.lease() as first:
        await client.acomplete(HELLO, PARAMS)
        async with client.lease() as second:
            assert first is second
        assert not first.session.closed
    assert first.session.closed


async def test_a_cancelled_request_frees_its_place(api: Any) -> None:
    client = api("hang", client_kwargs={"max_connections": 1})
    async with client.lease() as shared:
        task = asyncio.create_task(client.acomplete(HELLO, PARAMS))
        while not shared.slots.locked():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not shared.slots.locked()


def test_loopback_never_goes_through_a_proxy(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert api("answer")(HELLO, PARAMS)["content"] == "42"
    assert proxy_for("http://localhost:1/v1") is None
    assert proxy_for("http://[::1]:1/v1") is None
    assert proxy_for("http://10.0.0.5/v1") == "http://127.0.0.1:9"
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(ValueError, match="only http proxies"):
        proxy_for("http://10.0.0.5/v1")
    monkeypatch.setenv("no_proxy", "10.0.0.5")
    assert proxy_for("http://10.0.0.5/v1") is None


def test_connection_limit_is_within_the_open_file_limit() -> None:
    import resource

    assert 1 <= connection_limit() <= max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Mon, 01 Jan 2001 00:00:00 GMT"}, 0.0),
        ({"retry-after": "nonsense"}, None),
        ({"retry-after": "-4"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers) == seconds


def test_retry_waits_at_least_what_the_server_asks() -> None:
    policy = RetryPolicy(base_delay_s=0, max_attempts=2)
    error = ApiStatusError("x", retryable=True, retry_after_s=7)
    assert policy.delay_s(error, 1) == 7
    assert policy.delay_s(error, 2) is None
    assert policy.delay_s(ApiStatusError("x"), 1) is None


@pytest.mark.parametrize(
    "error",
    [
        ApiStatusError("m", status=500, retryable=True, retry_after_s=1.0),
        ContextLengthError("m"),
        ApiConnectionError("m"),
        ApiTimeoutError("m"),
        ApiReplyError("m", kind=ApiErrorKind.TOO_LARGE),
    ],
)
def test_errors_pickle(error: ApiError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"num_samples": 0},
        {"logprobs": -1},
        {"repetition_penalty": 0},
    ],
)
def test_sampling_params_refuse_what_is_out_of_range(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        SamplingParams(**kwargs)


def test_every_exported_name_resolves() -> None:
    import twinkle_agentic.protocol as protocol

    assert all(getattr(protocol, name) is not None for name in protocol.__all__)
