from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple

import pydantic
import pytest

from twinkle_agentic.tools.text import (
    MAX_TEXT_CHARS,
    clean_text,
    to_jsonable,
    to_text,
    truncate_middle,
)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(enum.StrEnum):
    ANN = "ann"


@dataclasses.dataclass
class Point:
    x: int
    label: str = "p"


class Pair(NamedTuple):
    a: int
    b: int


class Model(pydantic.BaseModel):
    day: date
    colour: Colour = Colour.RED


class Array:
    """An array of numpy's kind: summarised by `str`, whole by `tolist`."""

    def __init__(self, values: Any, shape: tuple[int, ...]) -> None:
        self.values, self.shape = values, shape
        self.ndim = len(shape)

    def tolist(self) -> Any:
        return self.values

    def __str__(self) -> str:
        return "[0 ... 9]" if self.ndim else str(self.values)


TEXTS: list[tuple[Any, str]] = [
    (None, ""),
    ("", ""),
    ("text", "text"),
    (3, "3"),
    (2.5, "2.5"),
    (True, "True"),
    (Decimal("1.10"), "1.10"),
    ({"a": None, "b": True}, '{"a": null, "b": true}'),
    ([1, "ä", "中"], '[1, "ä", "中"]'),
    ((1, 2), "[1, 2]"),
    ({3}, "[3]"),
    (deque([1, 2]), "[1, 2]"),
    (MappingProxyType({"a": 1}), '{"a": 1}'),
    (UserDict({"a": 1}), '{"a": 1}'),
    (OrderedDict(b=1, a=2), '{"b": 1, "a": 2}'),
    ({"a": 1}.keys(), '["a"]'),
    (b"caf\xc3\xa9 \xff", "café \ufffd"),
    (bytearray(b"ab"), "ab"),
    (memoryview(b"ab"), "ab"),
    (Point(1), '{"x": 1, "label": "p"}'),
    (Array([1, 2], (2,)), "[1, 2]"),
    (Array(7, ()), "7"),
    ([Level.HIGH, Name.ANN, Colour.RED], '[3, "ann", "red"]'),
    ({"nan": math.nan, "inf": -math.inf}, '{"nan": "NaN", "inf": "-Infinity"}'),
]


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_value_as_text(value: object, text: str) -> None:
    assert to_text(value) == text


def test_pydantic_model_is_json_text() -> None:
    text = to_text(Model(day=date(2026, 1, 2)))
    assert json.loads(text) == {"day": "2026-01-02", "colour": "red"}


def test_dataclass_that_says_how_it_prints_is_printed_so() -> None:
    @dataclasses.dataclass
    class Card:
        suit: str

        def __str__(self) -> str:
            return f"the card of {self.suit}"

    assert to_text(Card("hearts")) == "the card of hearts"
    assert to_jsonable(Card("hearts")) == {"suit": "hearts"}


def test_class_objects_are_printed_not_converted() -> None:
    assert to_text([Point, Model]) == json.dumps([str(Point), str(Model)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({3: "a", None: "b", True: "c"}, {"3": "a", "null": "b", "true": "c"}),
        ({2.5: "d"}, {"2.5": "d"}),
        ({(1, 2): "x"}, {"(1, 2)": "x"}),
        ({Colour.RED: 1, Name.ANN: 2}, {"red": 1, "ann": 2}),
        ({1: "a", "1": "b"}, {"1": "a", "'1'": "b"}),
        (date(2026, 1, 2), "2026-01-02"),
        (Pair(1, 2), [1, 2]),
        ([Array(Array([1.5], (1,)), ())], [[1.5]]),
    ],
)
def test_jsonable_form(value: Any, expected: Any) -> None:
    assert to_jsonable(value) == expected


def test_numpy_values_become_numbers() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency; real arrays are a bonus")
    value = {
        "i": numpy.int64(3),
        "f": numpy.float32(0.5),
        "b": numpy.bool_(True),
        "s": numpy.str_("x"),
        "a": numpy.arange(3),
        "nan": numpy.array([math.nan]),
        "scalar": numpy.array(4),
    }
    text = to_text(value)
    assert json.loads(text) == {
        "i": 3,
        "f": 0.5,
        "b": True,
        "s": "x",
        "a": [0, 1, 2],
        "nan": ["NaN"],
        "scalar": 4,
    }


def test_long_numpy_array_is_not_summarised() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency; real arrays are a bonus")
    assert json.loads(to_text(numpy.arange(3000))) == list(range(3000))


def test_cycle_is_named_instead_of_followed() -> None:
    value: dict[str, Any] = {"a": [1]}
    value["self"] = value
    value["a"].append(value["a"])
    assert json.loads(to_text(value)) == {"a": [1, "<cycle>"], "self": "<cycle>"}


def test_value_used_twice_is_no_cycle() -> None:
    shared = [1]
    assert to_jsonable([shared, shared]) == [[1], [1]]


def test_nesting_beyond_the_limit_is_cut_visibly() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    text = to_text(value, max_chars=None)
    assert text.startswith("[[[[")
    assert "<nested too deeply>" in text


def test_conversion_that_raises_falls_back_to_str() -> None:
    class Odd:
        def tolist(self) -> Any:
            raise RuntimeError("no list here")

        def __str__(self) -> str:
            return "odd"

    assert to_jsonable([Odd()]) == ["odd"]


def test_value_that_cannot_be_printed_is_named() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("mute")

    assert to_text(Mute()) == "<Mute that cannot be printed: RuntimeError>"
    assert to_jsonable({"a": Mute()}) == {"a": "<Mute that cannot be printed: RuntimeError>"}


class Proxy:
    """Has whatever it is asked for, until it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no connection for {name}")

    def __str__(self) -> str:
        return "a proxy"


class Lost(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("the file is closed")

    __repr__ = __str__ = lambda self: "lost"


class Broken(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("broken")

    __repr__ = __str__ = lambda self: "broken"


@pytest.mark.parametrize(
    ("make", "text"),
    [(Proxy, "a proxy"), (lambda: Lost(a=1), "lost"), (lambda: Broken([1]), "broken")],
)
def test_a_value_whose_own_methods_raise_is_printed(make: Callable[[], object], text: str) -> None:
    value = make()
    assert to_jsonable({"a": value}) == {"a": text}
    assert to_text({"a": [value], "b": {1}}) == f'{{"a": ["{text}"], "b": [1]}}'
    assert to_text(Proxy()) == "a proxy"


def test_integer_too_long_for_str_is_named() -> None:
    assert to_text(10**5000) == "<int that cannot be printed: ValueError>"
    assert "cannot be printed" in to_text([10**5000])


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain", "plain"),
        ("中文 🎉", "中文 🎉"),
        ("a\ud800b", "a\ufffdb"),
        ("\udc80end\ud83d", "\ufffdend\ufffd"),
        ("\ud83d\ude00", "😀"),
    ],
)
def test_lone_surrogates_are_replaced(text: str, clean: str) -> None:
    assert clean_text(text) == clean
    assert clean_text(text).encode()


def test_surrogates_inside_json_values_are_replaced() -> None:
    assert to_text({"a\ud800": "\udfff"}) == '{"a\ufffd": "\ufffd"}'


def test_text_within_the_limit_is_untouched() -> None:
    assert truncate_middle("a" * 100, 100) == "a" * 100


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 99])
def test_cut_text_keeps_head_and_tail_and_says_how_much_is_missing(limit: int) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(100))
    cut = truncate_middle(text, limit)
    head, notice, tail = cut.split("\n")
    assert notice == f"[... {100 - limit} of 100 characters cut ...]"
    assert len(head) + len(tail) == limit
    assert text.startswith(head)
    assert text.endswith(tail)


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chars must be at least 1, found 0"):
        truncate_middle("text", 0)


def test_text_is_cut_at_32768_characters_unless_told_otherwise() -> None:
    assert MAX_TEXT_CHARS == 32_768
    assert "[... 1 of 32769 characters cut ...]" in to_text("x" * 32_769)
    assert to_text("x" * 32_769, max_chars=None) == "x" * 32_769
