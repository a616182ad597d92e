"""The gateway's OpenAPI description: what other programs may rely on."""

from typing import Any

import msgspec

from rookery import __version__
from rookery.gateway.admin import PauseRequest, ResumeRequest
from rookery.gateway.openapi_calls import ANSWER, CALLS, CHAT, FAILING, REQUIRED, SCHEMAS
from rookery.gateway.registration import SESSION_ID, Registration


def build_openapi() -> dict[str, Any]:
    """The document."""
    _, parts = msgspec.json.schema_components(
        [Registration, PauseRequest, ResumeRequest], ref_template="#/components/schemas/{name}"
    )
    named = {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"}
    parts["Registration"]["properties"]["id"] = {**named, "description": "Made up where it is left out."}
    session = {"name": "id", "in": "path", "required": True, "schema": named}
    admin: list[dict[str, list[str]]] = [{"admin": []}]
    model: list[dict[str, list[str]]] = [{"secret": []}]
    paths: dict[str, Any] = {
        "/": {"get": _get("What this is."), "head": _get("Whether it is there.", body=False)},
        "/healthz": {"get": _get("Whether calls are answered.", failing=("503",))},
        "/metrics": {"get": _get("Figures for Prometheus.", kind="text/plain")},
        "/v1/models": {"get": _get("The models.", security=admin, failing=("401",))},
        "/state": {"get": _get("The pause and the version.", security=admin, failing=("401",))},
        "/pause": {
            "post": _post("Holds model calls back.", "PauseRequest", admin, failing=("400", "401", "413", "503"))
        },
        "/resume": {
            "post": _post("Lets them go on.", "ResumeRequest", admin, failing=("400", "401", "413", "503"))
        },
        "/rollouts": {
            "get": _get("The sessions.", security=admin, failing=("401",)),
            "post": _post(
                "Registers a session.",
                "Registration",
                admin,
                good="201",
                answer="Registered",
                failing=("400", "401", "409", "413"),
            ),
        },
        "/rollouts/{id}": {
            "parameters": [session],
            "get": _get("A session.", security=admin, failing=("401", "404", "410")),
            "delete": _get("Ends a session and forgets it.", security=admin, failing=("401", "404")),
        },
        "/rollouts/{id}/trajectory": {
            "parameters": [session],
            "get": _get("Its turns and segments.", security=admin, failing=("401", "404", "410")),
        },
        "/rollouts/{id}/cancel": {
            "parameters": [session],
            "post": _get("Ends a session; its record stays.", security=admin, failing=("401", "404", "410")),
        },
    }
    for inner in ("", "/v1"):
        base = f"/v1/rollouts/{{id}}{inner}"
        for path, (about, asked, answer, error, streams) in CALLS.items():
            call = _post(about, asked, model, answer=answer, failing=FAILING, error=error)
            if streams:
                call["responses"]["200"]["content"]["text/event-stream"] = {}
            paths[base + path] = {"parameters": [session], "post": call}
        kept = {"name": "response", "in": "path", "required": True, "schema": {**named, "minLength": 1}}
        paths[f"{base}/responses/{{response}}"] = {
            "parameters": [session, kept],
            "get": _get("An answer that was given before.", security=model, failing=("401", "404", "410")),
            "delete": _get("Forgets the name of an answer.", security=model, failing=("401", "404", "410")),
        }
        paths[f"{base}/models"] = {
            "parameters": [session],
            "get": _get("The models.", security=model, failing=("401", "404", "410")),
        }
    parts |= {"ChatCompletion": CHAT, "ChatCompletionAnswer": ANSWER, "Registered": REGISTERED, "Error": ERROR}
    parts |= SCHEMAS
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rookery gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": parts,
            "securitySchemes": {
                "admin": {"type": "http", "scheme": "bearer", "description": "The gateway's admin key."},
                "secret": {"type": "http", "scheme": "bearer", "description": "The session's secret."},
            },
        },
    }


ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

REGISTERED: dict[str, Any] = {
    "type": "object",
    "required": ["id", "base_url", "secret"],
    "properties": {
        "id": {"type": "string"},
        "base_url": {"type": "string", "description": "What a client's library is given."},
        "secret": {"type": "string", "description": "Its key; told here and never again."},
    },
}


def _get(
    about: str,
    *,
    security: list[dict[str, list[str]]] | None = None,
    failing: tuple[str, ...] = (),
    kind: str = "application/json",
    body: bool = True,
) -> dict[str, Any]:
    return {"summary": about, "security": security or [], "responses": _responses("200", failing, kind, body=body)}


def _post(
    about: str,
    schema: str,
    security: list[dict[str, list[str]]],
    *,
    good: str = "200",
    answer: str = "",
    failing: tuple[str, ...],
    error: str = "Error",
) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {
        "summary": about,
        "security": security,
        "requestBody": {"required": schema in REQUIRED, "content": content},
        "responses": _responses(good, failing, "application/json", answer=answer, error=error),
    }


def _responses(
    good: str, failing: tuple[str, ...], kind: str, *, body: bool = True, answer: str = "", error: str = "Error"
) -> dict[str, Any]:
    said: dict[str, Any] = {"type": "object"} if kind == "application/json" else {"type": "string"}
    if answer:
        said = {"$ref": f"#/components/schemas/{answer}"}
    responses: dict[str, Any] = {good: {"description": "As asked."}}
    if body:
        responses[good]["content"] = {kind: {"schema": said}}
    wrong = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    for status in failing:
        responses[status] = {"description": "What is wrong, in words.", "content": wrong}
    return responses
