from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import json
import warnings
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal

import pydantic
import pytest

from twinkle_agentic.tools import FunctionTool, ToolManager
from twinkle_agentic.tools._arguments import ArgumentsError


class Unit(enum.StrEnum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclasses.dataclass
class Place:
    city: str
    country: str = "FR"


class Query(pydantic.BaseModel):
    text: str
    limit: int = 5


def weather(place: Place, unit: Unit = Unit.CELSIUS, *, day: date | None = None) -> str:
    """Tell the weather.

    It is always fine.

    Args:
        place: Where, as precisely
            as you can.
        unit (Unit): Of the temperature.
        day: The day; today by default.

    Returns:
        The weather: in one word.
    """
    return f"{place!r} {unit!r} {day!r}"


unannotated: Any = eval("lambda city, n=1: (city, n)")
identity: Any = eval("lambda n: n")


def info(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    return dict(FunctionTool(function, **options).tool_info()["function"])  # type: ignore[typeddict-item]


def test_definition_comes_from_signature_and_docstring() -> None:
    definition = info(weather)
    assert definition["name"] == "weather"
    assert definition["description"] == "Tell the weather."
    parameters = definition["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert properties["place"]["description"] == "Where, as precisely as you can."
    assert properties["unit"]["description"] == "Of the temperature."
    assert properties["unit"]["default"] == "celsius"
    assert properties["day"]["description"] == "The day; today by default."
    assert "title" not in properties["day"]


def test_arguments_arrive_converted() -> None:
    text = FunctionTool(weather)("weather", {"place": {"city": "Lyon"}, "day": "2026-01-02"})
    assert text == f"{Place('Lyon')!r} {Unit.CELSIUS!r} {date(2026, 1, 2)!r}"


def test_name_and_description_can_be_given() -> None:
    definition = info(weather, name="forecast", description="")
    assert (definition["name"], definition["description"]) == ("forecast", "")


_NAMES = ["json", "copy", "schema", "model_name", "_private", "self", "model_fields_set"]


@pytest.mark.parametrize("name", [*_NAMES, "function", "args", "tool_name", "default"])
async def test_parameter_names_that_mean_something_elsewhere_work(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def tool({name}: int, other: int = 2):\n return {name} + other", scope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tool = FunctionTool(scope["tool"])
        assert list(info(scope["tool"])["parameters"]["properties"]) == [name, "other"]
        assert tool("tool", {name: 1}) == 3
        call: Any = {"function": {"name": "tool", "arguments": {name: 1, "other": 4}}}
        assert ToolManager([tool])(call) == "5"
        assert await ToolManager([tool]).acall(call) == "5"


def test_parameters_not_given_keep_the_functions_own_default() -> None:
    marker = object()

    def tool(a: Any = marker) -> bool:
        return a is marker

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FunctionTool(tool)("tool", {}) is True


def test_a_default_that_json_does_not_know_is_not_in_the_definition() -> None:
    @dataclasses.dataclass
    class Span:
        low: float = float("-inf")

    def tool(limit: float = float("inf"), default: float = float("nan"), span: Any = None) -> float:
        return limit

    tool.__annotations__["span"] = list[Span] | None
    text = json.dumps(info(tool), allow_nan=False)
    properties = json.loads(text)["parameters"]["properties"]
    assert properties["limit"] == properties["default"] == {"type": "number"}
    assert FunctionTool(tool)("tool", {}) == float("inf")


@pytest.mark.parametrize(
    "annotation",
    [Literal[()], Annotated[str, pydantic.StringConstraints(pattern="[")]],
    ids=["nothing", "pattern"],
)
def test_an_annotation_that_cannot_be_met_is_a_type_error(annotation: Any) -> None:
    def tool(a: Any) -> None: ...

    tool.__annotations__["a"] = annotation
    with pytest.raises(TypeError, match="make no JSON Schema"):
        FunctionTool(tool)


def test_unannotated_parameters_take_any_value() -> None:
    tool = FunctionTool(unannotated, name="weather")
    assert tool("weather", {"city": ["a", {"b": None}]}) == (["a", {"b": None}], 1)


@pytest.mark.parametrize(
    ("annotation", "value", "arrives"),
    [
        (int | None, None, None),
        (Literal["a", "b"], "a", "a"),
        (list[Place], [{"city": "Lyon"}], [Place("Lyon")]),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (set[int], [1, 2], {1, 2}),
        (Query, {"text": "x"}, Query(text="x")),
        (Annotated[int, pydantic.Field(ge=1)], 3, 3),
        (bytes, "ab", b"ab"),
    ],
)
def test_annotation_is_honoured(annotation: Any, value: Any, arrives: Any) -> None:
    def tool(a: Any) -> Any:
        return a

    tool.__annotations__["a"] = annotation
    wrapped = FunctionTool(tool)
    outcome = ToolManager([wrapped]).run({"function": {"name": "tool", "arguments": {"a": value}}})
    assert outcome.error is None
    assert wrapped("tool", {"a": value}) == arrives


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "place: Field required"),
        ({"place": {"city": "Lyon"}, "unit": "rankine"}, "unit: Input should be 'celsius' or"),
        ({"place": {"city": 3}}, r"place\.city: Input should be a valid string"),
        ({"place": {"city": "Lyon"}, "wind": 1}, "wind: Extra inputs are not permitted"),
    ],
)
async def test_arguments_that_do_not_fit_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentsError, match=message):
        FunctionTool(weather)("weather", arguments)
    with pytest.raises(ArgumentsError, match=message):
        await FunctionTool(weather).acall("weather", arguments)


async def test_argument_only_pydantic_can_refuse_is_an_invalid_argument() -> None:
    manager = ToolManager([FunctionTool(weather)])
    tool_call = {"function": {"name": "weather", "arguments": {"place": {"city": "L"}, "day": "x"}}}
    for outcome in (manager.run(tool_call), await manager.arun(tool_call)):
        assert outcome.error_kind == "invalid_arguments"
        assert "day: Input should be a valid date" in outcome.text
        assert "pydantic.dev" not in outcome.text


async def test_coroutine_function_is_awaited() -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    tool = FunctionTool(double)
    assert await tool.acall("double", {"n": 4}) == 8
    assert tool("double", {"n": 4}) == 8  # also where a loop runs in this thread


def test_coroutine_function_is_awaited_without_a_loop() -> None:
    async def double(n: int) -> int:
        return 2 * n

    assert FunctionTool(double)("double", {"n": 4}) == 8


async def test_callables_of_every_kind_are_wrapped() -> None:
    class Adder:
        """Counts."""

        def __init__(self) -> None:
            self.base = 10

        def add(self, n: int) -> int:
            """Add to ten."""
            return self.base + n

        async def __call__(self, n: int) -> int:
            """Add, later."""
            return self.base + n

    bound = FunctionTool(Adder().add)
    assert (info(Adder().add)["description"], bound("add", {"n": 1})) == ("Add to ten.", 11)
    instance = FunctionTool(Adder(), name="adder")
    assert instance.tool_info()["function"]["description"] == "Add, later."  # type: ignore[typeddict-item]
    assert await instance.acall("adder", {"n": 1}) == 11
    assert instance("adder", {"n": 1}) == 11
    partial = FunctionTool(functools.partial(weather, unit=Unit.KELVIN), name="kelvin")
    assert partial.tool_info()["function"]["description"] == "Tell the weather."  # type: ignore[typeddict-item]
    assert "KELVIN" in partial("kelvin", {"place": {"city": "Lyon"}})


@pytest.mark.parametrize(
    "function",
    [identity, functools.partial(divmod, 1)],
    ids=["lambda", "partial"],
)
def test_function_without_a_usable_name_needs_one(function: Any) -> None:
    with pytest.raises(ValueError, match="pass name="):
        FunctionTool(function)


def test_class_is_a_function_that_makes_its_objects() -> None:
    assert FunctionTool(Place)("Place", {"city": "Lyon"}) == Place("Lyon")


@pytest.mark.parametrize("name", ["<lambda>", "two words", "", "a" * 65, "naïve"])
def test_name_that_no_endpoint_accepts_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a tool name has 1 to 64 letters, digits, _ or -, found"):
        FunctionTool(identity, name=name)


def positional_only(a: int, /) -> None: ...


def with_args(*items: int) -> None: ...


def with_kwargs(**options: int) -> None: ...


def unknown_annotation(a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def callable_parameter(a: Callable[[int], int]) -> None: ...


class Opaque: ...


def opaque_parameter(a: Opaque) -> None: ...


SIGNATURES: list[Any] = [
    positional_only,
    with_args,
    with_kwargs,
    unknown_annotation,
    callable_parameter,
    opaque_parameter,
    3,
]


@pytest.mark.parametrize("function", SIGNATURES)
def test_signature_no_json_object_can_fill_is_refused(function: Any) -> None:
    with pytest.raises(TypeError):
        FunctionTool(function)


@pytest.mark.parametrize("timeout_s", [0, -1.0, "3"])
def test_unusable_timeout_is_refused(timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s must be above 0 or None"):
        FunctionTool(weather, timeout_s=timeout_s)


def test_docstring_that_starts_with_its_arguments_has_no_summary() -> None:
    def tool(a: int) -> int:
        """
        Args:
            a: A number: any.
        """
        return a

    definition = info(tool)
    assert definition["description"] == ""
    assert definition["parameters"]["properties"]["a"]["description"] == "A number: any."


def test_summary_of_one_line_before_its_arguments() -> None:
    def tool(a: int) -> int:
        """Do it.
        Args:
            a (dict[str, int], optional): A number.
        """
        return a

    definition = info(tool)
    assert definition["description"] == "Do it."
    assert definition["parameters"]["properties"]["a"]["description"] == "A number."
