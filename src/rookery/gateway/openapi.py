"""Build the OpenAPI document of a gateway: the admin API, and the operations of the installed API dialects.

Runs in gateway shards.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from rookery import __version__
from rookery.gateway.admin import PauseRequest, ResumeRequest
from rookery.gateway.dialects import load_dialects
from rookery.gateway.dialects.protocol import DescribedDialect, Dialect, Operation, StatefulDialect
from rookery.gateway.dialects.schemas import OPENAI_ERROR, TEXT, Schema, object_schema
from rookery.gateway.registration import SESSION_ID, Registration

_ADMIN: Final[list[dict[str, list[str]]]] = [{"admin": []}]
_SECRET: Final[list[dict[str, list[str]]]] = [{"secret": []}]
_NOT_FOUND: Final = ("401", "404", "410")
_CALL_ERRORS: Final = ("400", "401", "404", "410", "413", "502", "503", "504")
_PAUSE_ERRORS: Final = ("400", "401", "413", "503")
_OBJECT: Final[Schema] = {"type": "object"}
_ID: Final[Schema] = {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"}
_REGISTERED: Final = object_schema(
    ["id", "base_url", "secret"],
    "Registered",
    id=TEXT,
    base_url={**TEXT, "description": "The base URL of the session, to configure in the client library."},
    secret={**TEXT, "description": "The API key of the session. Only this response contains it."},
)


def build_openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a gateway with the installed dialects."""
    components: dict[str, Any] = {}
    session = {"name": "id", "in": "path", "required": True, "schema": _ID}

    def operation(
        summary: str,
        *,
        security: list[dict[str, list[str]]] | None = None,
        request: Schema | None = None,
        required: bool = False,
        response: Schema | None = _OBJECT,
        status: str = "200",
        kind: str = "application/json",
        errors: tuple[str, ...] = (),
        error: Schema = OPENAI_ERROR,
    ) -> dict[str, Any]:
        def content(schema: Schema) -> dict[str, Any]:
            if "title" in schema:
                components[schema["title"]] = {key: value for key, value in schema.items() if key != "title"}
                schema = {"$ref": f"#/components/schemas/{schema['title']}"}
            return {"schema": schema}

        success: dict[str, Any] = {"description": "Success."}
        if response is not None:
            success["content"] = {kind: content(response)}
        failure = {"description": "An error.", "content": {"application/json": content(error)}}
        described = {
            "summary": summary,
            "security": security or [],
            "responses": {status: success, **dict.fromkeys(errors, failure)},
        }
        if request is not None:
            described["requestBody"] = {"required": required, "content": {"application/json": content(request)}}
        return described

    _, structs = msgspec.json.schema_components(
        [Registration, PauseRequest, ResumeRequest], ref_template="#/components/schemas/{name}"
    )
    structs["Registration"]["properties"]["id"] = {
        **_ID,
        "description": "ID of the session. Generated if missing.",
    }
    components |= structs
    paths: dict[str, Any] = {
        "/": {
            "get": operation("Return the name and version of the gateway."),
            "head": operation("Check that the gateway is running.", response=None),
        },
        "/healthz": {"get": operation("Check that model calls can be answered.", errors=("503",))},
        "/metrics": {"get": operation("Return metrics for Prometheus.", response=TEXT, kind="text/plain")},
        "/v1/models": {"get": operation("List the models.", security=_ADMIN, errors=("401",))},
        "/state": {
            "get": operation(
                "Return whether the policy is paused, and its version.", security=_ADMIN, errors=("401",)
            )
        },
        "/pause": {
            "post": operation(
                "Pause the model calls of the policy.",
                security=_ADMIN,
                request=_ref("PauseRequest"),
                errors=_PAUSE_ERRORS,
            )
        },
        "/resume": {
            "post": operation(
                "Resume the model calls of the policy.",
                security=_ADMIN,
                request=_ref("ResumeRequest"),
                errors=_PAUSE_ERRORS,
            )
        },
        "/rollouts": {
            "get": operation("List the sessions.", security=_ADMIN, errors=("401",)),
            "post": operation(
                "Register a session.",
                security=_ADMIN,
                request=_ref("Registration"),
                response=_REGISTERED,
                status="201",
                errors=("400", "401", "409", "413"),
            ),
        },
        "/rollouts/{id}": {
            "parameters": [session],
            "get": operation("Return the state of a session.", security=_ADMIN, errors=_NOT_FOUND),
            "delete": operation(
                "End a session and delete its recorded turns.", security=_ADMIN, errors=("401", "404")
            ),
        },
        "/rollouts/{id}/trajectory": {
            "parameters": [session],
            "get": operation("Return the turns and segments of a session.", security=_ADMIN, errors=_NOT_FOUND),
        },
        "/rollouts/{id}/cancel": {
            "parameters": [session],
            "post": operation("End a session and keep its recorded turns.", security=_ADMIN, errors=_NOT_FOUND),
        },
    }
    for base in ("/v1/rollouts/{id}", "/v1/rollouts/{id}/v1"):
        for dialect in load_dialects().values():
            for path, call in _describe(dialect):
                post = operation(
                    call.summary,
                    security=_SECRET,
                    request=call.request,
                    required=True,
                    response=call.response,
                    errors=_CALL_ERRORS,
                    error=call.error,
                )
                if call.streams:
                    post["responses"]["200"]["content"]["text/event-stream"] = {}
                paths[base + path] = {"parameters": [session], "post": post}
            if isinstance(dialect, StatefulDialect):
                reply = {"name": "response", "in": "path", "required": True, "schema": {**_ID, "minLength": 1}}
                paths[f"{base}{dialect.stored_path}{{response}}"] = {
                    "parameters": [session, reply],
                    "get": operation("Return a stored response.", security=_SECRET, errors=_NOT_FOUND),
                    "delete": operation("Delete a stored response.", security=_SECRET, errors=_NOT_FOUND),
                }
        paths[f"{base}/models"] = {
            "parameters": [session],
            "get": operation("List the models.", security=_SECRET, errors=_NOT_FOUND),
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rookery gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "admin": {"type": "http", "scheme": "bearer", "description": "The gateway's admin key."},
                "secret": {"type": "http", "scheme": "bearer", "description": "The session's secret."},
            },
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _describe(dialect: Dialect) -> Iterator[tuple[str, Operation]]:
    """Yield each path of a dialect with its OpenAPI description; a generic one if the dialect provides none."""
    known = dialect.describe_operations() if isinstance(dialect, DescribedDialect) else {}
    for path in dialect.paths:
        summary = f"Call a model in the API of the dialect {dialect.name}."
        generic = Operation(summary=summary, request=_OBJECT, response=_OBJECT, error=_OBJECT, streams=True)
        yield path, known.get(path, generic)
    for path in getattr(dialect, "count_paths", ()):
        summary = f"Count prompt tokens in the API of the dialect {dialect.name}."
        generic = Operation(summary=summary, request=_OBJECT, response=_OBJECT, error=_OBJECT)
        yield path, known.get(path, generic)
