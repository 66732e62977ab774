from __future__ import annotations

from typing import Any

import pytest

from twinkle_agentic.tools.types import user_data_dict, user_data_get


@pytest.mark.parametrize("trajectory", [None, {}, {"user_data": None}, {"user_data": []}])
def test_no_user_data_is_an_empty_dict(trajectory: Any) -> None:
    assert user_data_dict(trajectory) == {}


def test_dict_is_copied_as_it_is() -> None:
    data = {"seed": 3, "text": "7"}
    assert user_data_dict({"user_data": data}) == data
    assert user_data_dict({"user_data": data}) is not data


def test_pairs_are_decoded() -> None:
    pairs = [("seed", "3"), ("task", '{"a": [1]}'), ["note", "no json"], ("n", 4)]
    assert user_data_dict({"user_data": pairs}) == {
        "seed": 3,
        "task": {"a": [1]},
        "note": "no json",
        "n": 4,
    }


def test_first_of_two_equal_keys_wins() -> None:
    assert user_data_dict({"user_data": [("a", "1"), ("a", "2")]}) == {"a": 1}


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "[" * 100_000, "9" * 5000])
def test_text_that_is_no_json_is_kept(text: str) -> None:
    assert user_data_get({"user_data": [("a", text)]}, "a") == text


def test_pairs_in_arrays_of_a_column_store_are_read() -> None:
    class Column:
        def __init__(self, values: Any) -> None:
            self.values = values

        def tolist(self) -> Any:
            return self.values

    assert user_data_dict({"user_data": Column([Column(["seed", "3"])])}) == {"seed": 3}


@pytest.mark.parametrize(
    "data",
    ["seed", 7, [7], [("a",)], [("a", 1, 2)], [(1, "a")], ["ab"], [{"seed": 1}], b"ab"],
)
def test_anything_else_is_refused(data: Any) -> None:
    with pytest.raises(
        ValueError, match=r"user_data must be a dict or a list of \(key, json text\)"
    ):
        user_data_dict({"user_data": data})


@pytest.mark.parametrize("trajectory", [["messages"], "text", 7])
def test_trajectory_that_is_no_mapping_is_refused(trajectory: Any) -> None:
    with pytest.raises(ValueError, match="a trajectory must be a mapping, found"):
        user_data_dict(trajectory)


def test_get_returns_the_value_or_the_default() -> None:
    trajectory = {"user_data": {"a": None}}
    assert user_data_get(trajectory, "a", 1) is None
    assert user_data_get(trajectory, "b", 1) == 1
