"""JSON schemas that several dialects use to describe their operations in the OpenAPI document."""

from typing import Any, Final

import msgspec

from rookery.gateway.dialects.protocol import Dialect, Operation, TokenCountDialect

Schema = dict[str, Any]

COUNT: Final[Schema] = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1}
TEMPERATURE: Final[Schema] = {"type": ["number", "null"], "minimum": 0, "maximum": 100}
PROBABILITY: Final[Schema] = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}
FLAG: Final[Schema] = {"type": ["boolean", "null"]}
TEXT: Final[Schema] = {"type": "string"}
NAME: Final[Schema] = {"type": "string", "minLength": 1}
TEXTS: Final[Schema] = {"type": ["array", "null"], "items": TEXT}
OBJECTS: Final[Schema] = {"type": ["array", "null"], "items": {"type": "object"}}
STOPS: Final[Schema] = {"type": ["string", "array", "null"], "items": TEXT}
INPUT_USAGE: Final[Schema] = {"type": "object", "required": ["input_tokens", "output_tokens"]}


def object_schema(required: list[str], title: str = "", **properties: Schema) -> Schema:
    """Return the JSON schema of an object. A schema with a title becomes a component of the OpenAPI document."""
    titled = {"title": title} if title else {}
    return {**titled, "type": "object", "required": required, "properties": properties}


def list_schema(item: Schema) -> Schema:
    """Return the JSON schema of a list with at least one item."""
    return {"type": "array", "minItems": 1, "items": item}


def messages_schema(roles: list[str], content: Schema) -> Schema:
    """Return the JSON schema of a list of messages with these roles and this schema of their content."""
    return list_schema(object_schema(["role", "content"], role={"enum": roles}, content=content))


def completion_schema(title: str, kind: str, choice: Schema, **more: Schema) -> Schema:
    """Return the JSON schema of a response of OpenAI's chat or legacy completions API.

    `kind` is the value of its field `object`, and `choice` the schema of one choice.
    """
    required = ["id", "object", "created", "model", "choices", "usage"]
    return object_schema(required, title, object={"const": kind}, choices=list_schema(choice), **more)


TOKEN_COUNT: Final = object_schema(["input_tokens"], "TokenCount", input_tokens={"type": "integer", "minimum": 0})
OPENAI_ERROR: Final = object_schema(
    ["error"],
    "Error",
    error=object_schema(
        ["message", "type", "param", "code"],
        message=TEXT,
        type=TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    ),
)


def describe_operations(
    dialect: Dialect, summary: str, request: Schema, response: Schema, error: Schema = OPENAI_ERROR
) -> dict[str, Operation]:
    """Describe all paths of a dialect: its model calls and, if it has them, its token counts."""
    call = Operation(summary=summary, request=request, response=response, error=error, streams=True)
    operations = dict.fromkeys(dialect.paths, call)
    if isinstance(dialect, TokenCountDialect):
        count = msgspec.structs.replace(
            call, summary="Count the prompt tokens of a request.", response=TOKEN_COUNT, streams=False
        )
        operations |= dict.fromkeys(dialect.count_paths, count)
    return operations
