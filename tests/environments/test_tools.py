"""Typed functions as tools: schemas, argument checking, refusals."""

import asyncio
import copy
import pickle
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.environments import Context, Tool, tool
from rookery.environments.tools import CallLimit, InvalidArguments

if TYPE_CHECKING:
    from somewhere import Unknown


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict, total=False):
    deep: bool


class Node(msgspec.Struct):
    value: int
    children: list["Node"] = []


@tool
def search(query: str, limit: int = 5, exact: bool = False) -> list[str]:
    """Searches the
    collection.

    More about it, not for the model.

    Args:
        query (str): What to look for,
            in words.
        limit: How many: at most 10.

    Returns:
        limit: not an argument.
    """
    return [query] * limit


@tool(name="renamed", description="Said here.", timeout=3)
async def other(colour: Colour = Colour.RED) -> str:
    """Not this."""
    return colour.value


def accepts(hint: Any, default: Any = ...) -> Tool:
    """A tool whose one parameter has the given type."""

    def function(value):
        return value

    function.__annotations__["value"] = hint
    if default is not ...:
        function.__defaults__ = (default,)
    return Tool(function)


def test_tool_has_the_functions_docstring_and_types():
    assert search.name == "search"
    assert search.description == "Searches the collection."
    assert search.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in words."},
            "limit": {"type": "integer", "description": "How many: at most 10.", "default": 5},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert search.blocking


def test_options_of_the_decorator_override_the_function():
    assert (other.name, other.description, other.timeout) == ("renamed", "Said here.", 3)
    assert other.parameters["properties"]["colour"]["default"] == "red"
    assert not other.blocking


def test_calling_a_tool_calls_its_function():
    assert search("a", limit=2) == ["a", "a"]
    assert asyncio.run(other(Colour.BLUE)) == "blue"


@pytest.mark.parametrize(
    ("hint", "schema", "text", "value"),
    [
        (str, {"type": "string"}, '"a"', "a"),
        (int, {"type": "integer"}, "3", 3),
        (float, {"type": "number"}, "3", 3.0),
        (bool, {"type": "boolean"}, "true", True),
        (list[int], {"type": "array", "items": {"type": "integer"}}, "[1]", [1]),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}, '{"a":1}', {"a": 1.0}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}, '"x"', "x"),
        (Literal["a", "b"], {"enum": ["a", "b"]}, '"b"', "b"),
        (Colour, {"$ref": "#/$defs/Colour"}, '"blue"', Colour.BLUE),
        (Point, {"$ref": "#/$defs/Point"}, '{"x":1}', Point(1)),
        (Options, {"$ref": "#/$defs/Options"}, '{"deep":true}', {"deep": True}),
        (Node, {"$ref": "#/$defs/Node"}, '{"value":1,"children":[{"value":2}]}', Node(1, [Node(2)])),
        (Annotated[int, msgspec.Meta(ge=0)], {"type": "integer", "minimum": 0}, "0", 0),
        (Any, {}, '[{"a":null}]', [{"a": None}]),
    ],
)
def test_every_kind_of_type_has_a_schema_and_is_parsed(hint, schema, text, value):
    made = accepts(hint)
    assert made.parameters["properties"]["value"] == schema
    assert made.parse(f'{{"value": {text}}}') == {"value": value}
    if "$ref" in schema:
        assert schema["$ref"].removeprefix("#/$defs/") in made.parameters["$defs"]
    msgspec.json.encode(made.schema)


def test_missing_arguments_use_the_functions_defaults():
    shared = [1]
    made = accepts(list[int], default=shared)
    assert made.parse("{}") == {}
    assert made.parameters["required"] == []
    assert accepts(int, default=None).parse('{"value": null}') == {"value": None}


@pytest.mark.parametrize("text", ["", "  \n", "{}"])
def test_empty_arguments_are_accepted(text):
    assert Tool(lambda: 1, name="now").parse(text) == {}


def test_numbers_and_booleans_as_strings_are_converted():
    assert search.parse('{"query": "a", "limit": "3", "exact": "true"}') == {
        "query": "a",
        "limit": 3,
        "exact": True,
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"query": "a"', "JSON"),
        ("[1]", "JSON"),
        ("null", "JSON"),
        ('{"limit": 2}', "query"),
        ('{"q": 1, "z": 2}', "q, z"),
        ('{"query": "a", "limit": "many"}', "$.limit"),
        ('{"query": "\ud800"}', "JSON"),
        ("[" * 100_000, "search"),
        ('{"query":' + "[" * 100_000, "search"),
    ],
)
def test_invalid_arguments_are_refused_with_the_reason_and_the_schema(text, named):
    with pytest.raises(InvalidArguments) as caught:
        search.parse(text)
    assert named in str(caught.value)
    assert '"required":["query"]' in str(caught.value)
    assert len(str(caught.value)) < 3_000


@given(st.one_of(st.text(), st.binary().map(lambda data: data.decode("latin-1"))))
@settings(deadline=None)
def test_any_text_is_parsed_or_refused(text):
    try:
        found = search.parse(text)
    except InvalidArguments:
        return
    assert isinstance(found["query"], str)


def test_exception_of_a_types_validation_is_a_refusal():
    @dataclass
    class Even:
        n: int

        def __post_init__(self):
            raise KeyError("odd")

    with pytest.raises(InvalidArguments, match="odd"):
        accepts(Even).parse('{"value": {"n": 1}}')


class Custom:
    pass


def no_type(query):
    pass


def rest(*queries: str):
    pass


def keywords(**options: str):
    pass


def by_position(query: str, /):
    pass


def custom(query: Custom):
    pass


def unfindable(query: "Unknown"):
    pass


def yields(query: str):
    yield query


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (no_type, "'query'.*no_type"),
        (rest, "queries"),
        (keywords, "options"),
        (by_position, "'query'.*by_position"),
        (custom, "Custom"),
        (unfindable, "Unknown"),
        (yields, r"\byields\b"),
        (lambda: 1, "lambda"),
        (7, "7"),
    ],
)
def test_invalid_functions_are_refused(function, named):
    with pytest.raises(UsageError, match=named):
        Tool(function)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_timeout_must_be_finite_and_positive(timeout):
    with pytest.raises(UsageError, match="timeout"):
        tool(timeout=timeout)(no_argument)


def no_argument() -> None:
    pass


def test_injected_parameters_are_not_in_the_schema():
    def by_type(query: str, where: Context, seconds: CallLimit): ...
    def by_name(query: str, ctx): ...
    def by_text(query: str, where: "Context"): ...

    for function in (by_type, by_name, by_text):
        made = Tool(function)
        assert list(made.parameters["properties"]) == ["query"]
        with pytest.raises(InvalidArguments, match="where, ctx, seconds"):
            made.parse('{"query": "a", "where": {}, "ctx": {}, "seconds": 1}')
    assert Tool(by_type).enforces_limit
    assert not Tool(by_name).enforces_limit


def test_tool_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(search)) is search
    quick = pickle.loads(pickle.dumps(search.with_timeout(2)))
    assert (quick.name, quick.timeout, quick.parse('{"query": "a"}')["query"]) == ("search", 2, "a")
    assert search.timeout is None
    made = pickle.loads(pickle.dumps(Tool(no_argument, name="n", timeout=1)))
    assert (made.name, made.timeout) == ("n", 1)


def test_copied_tool_works():
    assert copy.copy(search).parse('{"query": "a"}')["query"] == "a"
