# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
from __future__ import annotations

import itertools
import json
import pickle
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, Field

import twinkle_agentic.envs.openenv as package
from twinkle_agentic.envs.base import Env
from twinkle_agentic.envs.errors import EnvError, ErrorKind, SessionClosedError
from twinkle_agentic.envs.openenv import ActionRefusedError, OpenEnvClient, ServerError
from twinkle_agentic.envs.openenv._bindings import WireBinding
from twinkle_agentic.envs.openenv._config import ServerAddress
from twinkle_agentic.envs.openenv._importing import import_module, is_importable, load_object
from twinkle_agentic.envs.openenv._protocol import MessageType, decode, encode, unsolicited
from twinkle_agentic.envs.openenv._reset_kwargs import (
    ResetKwargs,
    collect_reset_kwargs,
    fit_to_signature,
)
from twinkle_agentic.envs.openenv._results import RawResult, read_result
from twinkle_agentic.envs.openenv._session import backoff_delays
from twinkle_agentic.envs.openenv._tool_schemas import (
    action_kind,
    check_fields,
    tool_from_action,
    tools_from_mcp,
)

BASE = "http://10.0.0.5:8000"


def test_public_names() -> None:
    assert package.__all__ == [
        "ActionRefusedError",
        "CodingTaskEnv",
        "EnvPool",
        "EnvPoolAdapter",
        "OpenEnv",
        "OpenEnvClient",
        "ServerError",
    ]
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = package.NoSuchName  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("given", "websocket", "http"),
    [
        ("http://h:8000", "ws://h:8000/ws", "http://h:8000"),
        ("https://h/", "wss://h/ws", "https://h"),
        ("ws://h:1/ws", "ws://h:1/ws", "http://h:1"),
        ("wss://h/prefix/", "wss://h/prefix/ws", "https://h/prefix"),
        (" http://[::1]:8000 ", "ws://[::1]:8000/ws", "http://[::1]:8000"),
    ],
)
def test_addresses(given: str, websocket: str, http: str) -> None:
    address = ServerAddress.parse(given)
    assert (address.websocket_url, address.http_url) == (websocket, http)


@pytest.mark.parametrize(
    "url", ["", "h:8000", "ftp://h", "http://", "http://h:99999", "http://h:x"]
)
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"base_url.*10\.0\.0\.5"):
        OpenEnvClient("x", base_url=url)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.8.9.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.5:1", False),
        ("http://localhost.example.com", False),
    ],
)
def test_loopback(url: str, loopback: bool) -> None:
    assert ServerAddress.parse(url).is_loopback is loopback


def test_address_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENV_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="OPENENV_BASE_URL"):
        OpenEnvClient("x")
    monkeypatch.setenv("OPENENV_BASE_URL", BASE)
    assert OpenEnvClient("x").url == BASE


@pytest.mark.parametrize("names", [{}, {"env_name": "x", "env_cls": "x:X"}])
def test_either_name_or_class(names: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either env_name or env_cls"):
        OpenEnvClient(base_url=BASE, **names)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connect_timeout_s", 0),
        ("message_timeout_s", -1),
        ("message_timeout_s", None),
        ("capacity_timeout_s", -0.1),
        ("close_timeout_s", 0),
        ("ping_interval_s", 0),
        ("max_message_bytes", 0),
        ("max_action_bytes", True),
    ],
)
def test_limits_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        OpenEnvClient("x", base_url=BASE, **{name: value})


def test_client_is_an_env_with_the_documents_arguments() -> None:
    env = OpenEnvClient(
        "coding_env", None, BASE, None, None, None, {"a": 1}, 5.0, 60.0, {"max_message_size_mb": 1}
    )
    assert isinstance(env, Env)
    assert env.reset_kwargs == {"a": 1}
    assert (env.episode_reward, env.last_result) == (0.0, None)


def test_tool_without_a_name_is_refused() -> None:
    env = OpenEnvClient("x", base_url=BASE)
    with pytest.raises(ValueError, match=r"function\.name"):
        env.register_tool({}, lambda env, arguments: "")
    with pytest.raises(TypeError, match="callable"):
        env.register_tool({"function": {"name": "f"}}, "no function")


def test_frames() -> None:
    assert encode(MessageType.STATE, None) == b'{"type":"state"}'
    assert json.loads(encode(MessageType.STEP, {"a": "é"})) == {"type": "step", "data": {"a": "é"}}
    assert encode(MessageType.STEP, "x" * 8, max_bytes=33)
    with pytest.raises(ActionRefusedError, match="has 33 bytes and the server takes 32"):
        encode(MessageType.STEP, "x" * 8, max_bytes=32)


def test_deep_arguments_are_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ActionRefusedError, match="no JSON"):
        encode(MessageType.STEP, deep)


def test_answers() -> None:
    data = {"observation": {}, "reward": None, "done": False}
    assert decode(json.dumps({"type": "observation", "data": data}), MessageType.STEP) == data
    with pytest.raises(SessionClosedError, match="expected a frame of type 'state'"):
        decode(json.dumps({"type": "observation", "data": data}), MessageType.STATE)
    assert isinstance(unsolicited("not JSON"), SessionClosedError)


def test_raw_result_reads_like_the_typed_one() -> None:
    raw = RawResult.of({"observation": {"stdout": "x"}, "reward": 1, "done": True})
    assert raw.observation.stdout == raw.observation["stdout"] == "x"
    with pytest.raises(AttributeError, match="no field 'stdin'"):
        _ = raw.observation.stdin
    assert pickle.loads(pickle.dumps(raw)) == raw


@pytest.mark.parametrize(
    "error",
    [
        ActionRefusedError("no", errors=[{"loc": ["a"]}]),
        ServerError("x", code="C", session_lives=True),
        ServerError("x", code="D", kind=ErrorKind.SESSION_LOST),
    ],
)
def test_errors_pickle(error: Any) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


def test_backoff_grows_to_a_bound_with_jitter() -> None:
    delays = list(itertools.islice(backoff_delays(0.1, 1.0), 50))
    for delay, bound in zip(delays, [0.1, 0.2, 0.4, 0.8, *[1.0] * 46], strict=True):
        assert bound / 2 <= delay <= bound
    assert len(set(delays)) > 40


def test_reset_kwargs_of_a_trajectory() -> None:
    data = {"seed": 1, "episode_id": None, "size": 4, "reset_kwargs": {"a": 2, "b": 3}}
    kwargs = collect_reset_kwargs({"a": 0, "c": 5}, {"user_data": data})
    assert kwargs == ResetKwargs(explicit={"a": 2, "c": 5, "seed": 1, "b": 3}, offered={"size": 4})
    assert collect_reset_kwargs({}, {"user_data": data}, ["other"]).offered == {}
    assert collect_reset_kwargs({}, None) == ResetKwargs()
    with pytest.raises(ValueError, match="keyword arguments"):
        collect_reset_kwargs({}, {"user_data": {"reset_kwargs": 3}})


def test_reset_kwargs_fit_the_signature() -> None:
    def strict(seed: int | None = None) -> None: ...
    def lenient(**kwargs: Any) -> None: ...
    def nothing() -> None: ...

    kwargs = ResetKwargs(explicit={"seed": 1}, offered={"label": "x"})
    assert fit_to_signature(strict, kwargs) == ({"seed": 1}, [])
    assert fit_to_signature(lenient, kwargs) == ({"seed": 1, "label": "x"}, [])
    assert fit_to_signature(nothing, kwargs, strict=False) == ({}, ["seed"])
    with pytest.raises(EnvError, match="no parameter 'seed': it takes none"):
        fit_to_signature(nothing, kwargs)
    with pytest.raises(EnvError, match="no parameter 'sead': it takes seed"):
        fit_to_signature(strict, ResetKwargs(explicit={"sead": 1}))


CALL = {"properties": {"tool_name": {}, "arguments": {}, "type": {}}}
CALL_OF_A_KIND = {
    "properties": {"action_type": {}, "tool_name": {}, "arguments": {}},
    "required": ["action_type"],
}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (None, "code"),
        ({}, "code"),
        ({"properties": {"code": {}, "metadata": {}}, "required": ["code"]}, "code"),
        ({"properties": {"code": {}, "is_final": {}}, "required": ["code"]}, "fields"),
        ({"properties": {"code": {}, "language": {}}, "required": ["code", "language"]}, "fields"),
        ({"properties": {"column": {}}}, "fields"),
        (CALL, "mcp"),
        (CALL_OF_A_KIND, "fields"),
        ({"oneOf": [{"$ref": "#/$defs/Call"}], "$defs": {"Call": CALL}}, "mcp"),
    ],
)
def test_action_kind(schema: Any, kind: str) -> None:
    assert action_kind(schema) == kind


def test_tool_of_an_action_schema() -> None:
    schema = {
        "description": "Drop a piece.",
        "properties": {"column": {"title": "Column", "type": "integer"}, "metadata": {}},
        "required": ["column"],
        "$defs": {"X": {}},
    }
    tool = tool_from_action(schema)
    assert tool["function"] == {
        "name": "env_action",
        "description": "Drop a piece.",
        "parameters": {
            "type": "object",
            "properties": {"column": {"type": "integer"}},
            "required": ["column"],
            "$defs": {"X": {}},
        },
    }


SNAKE = """Steer the snake.

    For one snake:
        0 = straight on
        1 = left
"""

CHESS = """Move a piece.

    Attributes:
        move: UCI format (e.g., "e2e4"),
            with a letter for a promotion.
        depth (int): How far to look.

    Example:
        >>> Move(move="e2e4")
"""


def test_tool_of_an_action_says_all_that_its_class_says_to_a_model() -> None:
    class Steer(BaseModel):
        direction: int

    Steer.__doc__ = SNAKE
    function = tool_from_action(Steer.model_json_schema())["function"]
    assert function["description"] == (
        "Steer the snake.\n\nFor one snake:\n    0 = straight on\n    1 = left"
    )


def test_attributes_of_a_docstring_describe_the_fields() -> None:
    class Move(BaseModel):
        move: str
        depth: int = Field(2, description="Its own words.")

    Move.__doc__ = CHESS
    function = tool_from_action(Move.model_json_schema())["function"]
    assert function["description"] == "Move a piece."
    fields = function["parameters"]["properties"]
    assert fields["move"]["description"] == (
        'UCI format (e.g., "e2e4"), with a letter for a promotion.'
    )
    assert fields["depth"]["description"] == "Its own words."


def test_python_in_a_docstring_is_left_out_and_the_prose_around_it_kept() -> None:
    text = """Move the joints.

Values are torques.
>>> Move(values=[0.5])

Example (walker - 6D):
    >>> Move(values=[0.1, -0.2])

As many as there are joints."""
    function = tool_from_action({"description": text, "properties": {"values": {}}})["function"]
    assert function["description"] == (
        "Move the joints.\n\nValues are torques.\n\nAs many as there are joints."
    )


def test_attributes_that_are_no_fields_stay_in_the_description() -> None:
    text = "Drop a piece.\n\nAttributes:\n    column: 0 to 6.\n    the rest: as in chess"
    tool = tool_from_action({"description": text, "properties": {"column": {}}})
    assert tool["function"]["description"] == text
    assert tool["function"]["parameters"]["properties"]["column"]["description"] == "0 to 6."


def test_tools_of_both_kinds_of_mcp_listing() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    listing = [{"name": "x", "inputSchema": schema}, {"name": "y", "input_schema": schema}, {}, 3]
    assert [t["function"]["parameters"] for t in tools_from_mcp(listing)] == [schema, schema]


def test_field_names_are_checked_and_values_are_not() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    check_fields({"a": "5", "b": 1}, schema)
    strict = {**schema, "additionalProperties": False}
    with pytest.raises(
        ActionRefusedError, match="b: Extra inputs are not permitted; the fields are a"
    ):
        check_fields({"a": 1, "b": 2}, strict)
    secret = {"properties": {"a": {}, "temp_api_key": {}}, "required": ["a"]}
    with pytest.raises(ActionRefusedError, match=r"the fields are a$"):
        check_fields({}, secret)
    with pytest.raises(ActionRefusedError, match="a: Field required"):
        WireBinding(schema).to_payload({})
    with pytest.raises(ActionRefusedError, match="dict of fields or an Action, found str"):
        WireBinding(None).to_payload("print(1)")


def test_objects_by_name() -> None:
    assert load_object("json:dumps", argument="x") is json.dumps
    assert load_object("json.dumps", argument="x") is json.dumps
    assert load_object(json.dumps, argument="x") is json.dumps
    with pytest.raises(ValueError, match="x must be 'module:Name'"):
        load_object("dumps", argument="x")
    with pytest.raises(ModuleNotFoundError, match=r"x='no_such.module:X'.*not installed"):
        load_object("no_such.module:X", argument="x")
    with pytest.raises(ImportError, match="has no 'nothing'"):
        load_object("json:nothing", argument="x")
    assert is_importable("json") and not is_importable("no_such_module_at_all")


def test_two_packages_with_bare_imports_keep_their_models_apart(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first_env", "second_env"):
        server = tmp_path / name / "server"
        server.mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        (server / "__init__.py").touch()
        (tmp_path / name / "models.py").write_text(f"NAME = {name!r}\n")
        (server / "helpers.py").write_text("KIND = 'helper'\n")
        (server / "main_part.py").write_text(
            "from models import NAME\nfrom helpers import KIND\nimport server.helpers\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    for name in ("first_env", "second_env"):
        loaded = import_module(f"{name}.server.main_part")
        assert (name, "helper") == (loaded.NAME, loaded.KIND)
    assert not {"models", "helpers", "server"} & sys.modules.keys()
    assert sys.modules["first_env.models"].NAME == "first_env"
    for name in [m for m in sys.modules if m.split(".")[0] in ("first_env", "second_env")]:
        del sys.modules[name]


def test_missing_module_of_others_is_reported_as_it_is(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third_env").mkdir()
    (tmp_path / "third_env" / "__init__.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_module("third_env")


def test_results_in_process() -> None:
    class Observation:
        model_fields: ClassVar[dict[str, int]] = {"reward": 0, "done": 0, "observation": 0}
        reward, done, observation = 1.5, True, [1.0] * 3
        metadata: ClassVar[dict[str, int]] = {"m": 1}

    found = read_result(Observation())
    assert (found.reward, found.done, found.metadata) == (1.5, True, {"m": 1})
    assert isinstance(found.observation, Observation)

    class Result:
        observation, reward, done = {"text": "x"}, None, False

    found = read_result(Result())
    assert (found.observation, found.reward, found.done) == ({"text": "x"}, None, False)
    found = read_result({"observation": "o", "reward": 2, "done": True})
    assert (found.observation, found.reward, found.done) == ("o", 2, True)
    assert read_result("text").observation == "text"
    with pytest.raises(EnvError, match="expected an OpenEnv Observation"):
        read_result(3)


@pytest.mark.parametrize("limit", [float("inf"), float("nan"), 0, -1, True, "5", 1e12])
@pytest.mark.parametrize(
    "name",
    ["connect_timeout_s", "message_timeout_s", "close_timeout_s", "ping_interval_s"],
)
def test_limits_that_bound_nothing_are_refused(name: str, limit: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0.*, found"):
        OpenEnvClient("x", base_url=BASE, **{name: limit})


@pytest.mark.parametrize("name", ["max_message_bytes", "max_action_bytes", "max_observation_chars"])
@pytest.mark.parametrize("count", [0, -1, 1.5, float("inf"), True])
def test_sizes_that_are_no_whole_number_are_refused(name: str, count: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1.*, found"):
        OpenEnvClient("x", base_url=BASE, **{name: count})


def test_waiting_for_room_may_be_turned_off() -> None:
    OpenEnvClient("x", base_url=BASE, capacity_timeout_s=0, ping_interval_s=None)
    with pytest.raises(ValueError, match="capacity_timeout_s must be at least 0, found nan"):
        OpenEnvClient("x", base_url=BASE, capacity_timeout_s=float("nan"))
