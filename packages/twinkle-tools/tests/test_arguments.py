from __future__ import annotations

import json
import pickle
import warnings
from typing import Any

import pytest

from twinkle_agentic.tools._arguments import ArgumentsError, compile_schema, parse_arguments


@pytest.mark.parametrize("raw", [None, "", "  \n", "null", "{}", '"{}"', '""', {}])
def test_nothing_is_an_empty_object(raw: object) -> None:
    assert parse_arguments(raw) == {}


@pytest.mark.parametrize(
    "raw",
    ['{"a": 1}', '"{\\"a\\": 1}"', {"a": 1}, ' {"a": 1}\n'],
    ids=["text", "twice encoded", "object", "blanks"],
)
def test_object_is_parsed(raw: object) -> None:
    assert parse_arguments(raw) == {"a": 1}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("[1]", "must be a JSON object, found list"),
        ("3", "must be a JSON object, found int"),
        ("true", "must be a JSON object, found bool"),
        ([], "must be a JSON object, found list"),
        (3, "must be a JSON object, found int"),
        (b"{}", "must be a JSON object, found bytes"),
        ('"\\"\\\\\\"{}\\\\\\"\\""', "must be a JSON object, found str"),
        ('{"a": 1', "invalid JSON in arguments: "),
        ("{'a': 1}", "invalid JSON in arguments: "),
        ('{"a": 1} {"b": 2}', "invalid JSON in arguments: Extra data"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "1e999 is too large"),
        ('{"a": -1e999}', "-1e999 is too large"),
        ({"a": [float("nan")]}, "nan is not a JSON number"),
        ({"a": {"b": float("inf")}}, "inf is not a JSON number"),
        ({1: 2}, "names must be text, found 1"),
        ('{"a": ' + "9" * 5000 + "}", "invalid JSON in arguments: "),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_anything_else_is_refused(raw: object, message: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        parse_arguments(raw)
    assert message in str(caught.value)


def test_nesting_too_deep_is_refused_in_a_parsed_object() -> None:
    value: dict[str, Any] = {}
    for _ in range(100_000):
        value = {"a": value}
    with pytest.raises(ArgumentsError, match="nested too deeply"):
        parse_arguments(value)


def test_parsed_object_is_copied() -> None:
    raw: dict[str, Any] = {"a": {"b": [1]}}
    arguments = parse_arguments(raw)
    arguments["a"]["b"].append(2)
    arguments.clear()
    assert raw == {"a": {"b": [1]}}


def test_megabytes_of_arguments_are_parsed() -> None:
    code = "x" * 20_000_000
    assert parse_arguments(json.dumps({"code": code}))["code"] == code


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_fitting_arguments_pass() -> None:
    assert compile_schema(SCHEMA, tool_name="t")({"n": 1}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "arguments: 'n' is a required property"),
        ({"n": "1"}, "n: '1' is not of type 'integer'"),
        ({"n": True}, "n: True is not of type 'integer'"),
        ({"n": 1, "x": 2}, "arguments: Additional properties are not allowed"),
        ({"n": "1", "s": 2}, "n: '1' is not of type 'integer'; s: 2 is not of type 'string'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        compile_schema(SCHEMA, tool_name="t")(arguments)
    assert message in str(caught.value)


def test_at_most_five_violations_of_bounded_length_are_named() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    arguments = {f"k{number}": "v" * 10_000 for number in range(50)}
    with pytest.raises(ArgumentsError) as caught:
        compile_schema(schema, tool_name="t")(arguments)
    assert str(caught.value).count("k") == 5
    assert len(str(caught.value)) < 2_000


DRAFTS = {
    "none": None,
    "3": "http://json-schema.org/draft-03/schema#",
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
    "unknown": "https://example.invalid/my-own-dialect",
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_schema_of_every_draft_is_checked(draft: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
    if DRAFTS[draft]:
        schema["$schema"] = DRAFTS[draft]
    validate = compile_schema(schema, tool_name="t")
    assert validate({"n": 1}) is None
    with pytest.raises(ArgumentsError, match="is not of type 'integer'"):
        validate({"n": "one"})


def test_keywords_mean_what_the_draft_says() -> None:
    bound = {"minimum": 1, "exclusiveMinimum": True}
    schema = {"$schema": DRAFTS["4"], "type": "object", "properties": {"n": bound}}
    with pytest.raises(ArgumentsError, match="less than or equal to"):
        compile_schema(schema, tool_name="t")({"n": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}}},
        {
            "type": "object",
            "properties": {"child": {"$ref": "#/$defs/node"}, "n": {"$ref": "#/$defs/number"}},
            "$defs": {
                "number": {"type": "integer"},
                "node": {"properties": {"n": {"$ref": "#/$defs/number"}}},
            },
        },
        {
            "$id": "https://example.invalid/root",
            "type": "object",
            "properties": {"child": {"$ref": "node"}, "n": {"$ref": "node#/properties/n"}},
            "$defs": {"node": {"$id": "node", "properties": {"n": {"type": "integer"}}}},
        },
        {
            "$schema": DRAFTS["7"],
            "type": "object",
            "properties": {
                "child": {"properties": {"n": {"$ref": "#/definitions/n"}}},
                "n": {"$ref": "#/definitions/n"},
            },
            "definitions": {"n": {"type": "integer"}},
        },
    ],
    ids=["recursive", "defs", "ids", "definitions"],
)
def test_references_inside_the_schema_are_followed(schema: dict[str, Any]) -> None:
    validate = compile_schema(schema, tool_name="t")
    assert validate({"n": 1, "child": {"n": 2}}) is None
    with pytest.raises(ArgumentsError, match=r"child\.n: 'x' is not of type 'integer'"):
        validate({"n": 1, "child": {"n": "x"}})
    with pytest.raises(ArgumentsError, match="n: 'x' is not of type 'integer'"):
        validate({"n": "x"})


@pytest.mark.parametrize(
    "reference",
    ["#/$defs/missing", "http://127.0.0.1:9/schema.json", "other.json", "#anchor", 7],
)
def test_reference_that_leads_nowhere_is_refused_without_a_request(reference: object) -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": reference}}}
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match="the parameters of tool 'search'"),
    ):
        warnings.simplefilter("error")
        compile_schema(schema, tool_name="search")


def test_ref_that_is_a_plain_value_is_no_reference() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [{"$ref": "#/nowhere"}]}}}
    assert compile_schema(schema, tool_name="t")({"n": {"$ref": "#/nowhere"}}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"type": dict},
        {"properties": []},
        {"required": "n"},
        {"type": "object", "properties": {"n": {"pattern": 3}}},
        {"$schema": 5},
        [],
        "object",
        7,
    ],
)
def test_invalid_schema_is_refused(schema: Any) -> None:
    with pytest.raises(
        ValueError, match="the parameters of tool 'search' are no valid JSON Schema"
    ):
        compile_schema(schema, tool_name="search")


def test_pattern_python_cannot_compile_is_not_checked_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    properties = {"a": {"type": "string", "pattern": r"^\p{L}+$"}, "b": {"pattern": "^x"}}
    schema = {"type": "object", "properties": properties}
    validate = compile_schema(schema, tool_name="search")
    assert validate({"a": "ä", "b": "x"}) is None
    assert r"\p{L}" in caplog.text
    with pytest.raises(
        ArgumentsError, match=r"a: 3 is not of type 'string'; b: 'y' does not match"
    ):
        validate({"a": 3, "b": "y"})


def test_arguments_nested_deeper_than_the_validator_goes_are_refused() -> None:
    schema = {"type": "object", "additionalProperties": {"$ref": "#"}}
    value: dict[str, Any] = {}
    for _ in range(900):
        value = {"a": value}
    with pytest.raises(ArgumentsError, match="nested too deeply"):
        compile_schema(schema, tool_name="t")(value)


def test_schema_is_copied() -> None:
    schema: dict[str, Any] = {"type": "object", "required": ["n"]}
    validate = compile_schema(schema, tool_name="t")
    schema["required"].clear()
    with pytest.raises(ArgumentsError, match="'n' is a required property"):
        validate({})


def test_compiled_schema_pickles() -> None:
    validate = pickle.loads(pickle.dumps(compile_schema(SCHEMA, tool_name="t")))
    with pytest.raises(ArgumentsError, match="'n' is a required property"):
        validate({})


def test_the_same_schema_is_compiled_once() -> None:
    def schema(default: object) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"const": default}}}

    first = compile_schema(schema(1), tool_name="once")
    assert compile_schema(schema(1), tool_name="once") is first
    assert compile_schema(schema(True), tool_name="once") is not first
    assert compile_schema(schema(1), tool_name="other") is not first


def test_a_compiled_schema_does_not_follow_later_changes() -> None:
    schema: dict[str, Any] = {"type": "object", "required": []}
    compile_schema(schema, tool_name="later")({})
    schema["required"].append("a")
    with pytest.raises(ArgumentsError, match="'a'"):
        compile_schema(schema, tool_name="later")({})
